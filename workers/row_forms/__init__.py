"""Converts rows of well-known data sets, with their own field names, to the fields of a handler's instances."""
