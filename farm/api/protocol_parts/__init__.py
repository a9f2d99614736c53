"""Common parts of the protocols of other systems."""
