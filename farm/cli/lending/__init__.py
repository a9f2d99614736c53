"""Commands for borrowed sandboxes."""
