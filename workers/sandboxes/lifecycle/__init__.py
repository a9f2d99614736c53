"""Start and end of sandboxes: starts, the warm pool, layers, the reaper."""
