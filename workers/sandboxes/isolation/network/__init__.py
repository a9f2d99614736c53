"""The network of a sandbox, as programs inside find it; standard library only."""
