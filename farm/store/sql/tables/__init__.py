"""Tables of data that accompanies model calls."""
