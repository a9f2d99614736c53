"""Images of sandboxes and other data that is created once and bound read-only: sources, builds, the cache."""
