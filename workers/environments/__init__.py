"""Environments with steps: their contract, the server that plays them in a sandbox, and the node's side of it."""
