"""Images of sandboxes and all else that is made once and bound read-only: sources, builds, the cache."""
