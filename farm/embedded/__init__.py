"""A farm on one machine, with its servers as child processes."""
