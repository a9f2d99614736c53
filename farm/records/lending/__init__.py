"""Borrowed sandboxes: their states, and the calls to them."""
