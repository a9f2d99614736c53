"""One node: the supervisor of its worker processes, and the preparation and clean-up of its sandboxes and caches."""
