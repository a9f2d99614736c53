"""The persistent bash of a sandbox."""
