"""Commands of a farm on a cluster."""
