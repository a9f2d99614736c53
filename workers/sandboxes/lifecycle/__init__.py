"""The start and the end of sandboxes: starts, the warm pool, layers, the reaper."""
