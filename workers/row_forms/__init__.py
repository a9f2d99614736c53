"""Rows of well-known data sets, in their own field names, as the fields of a handler's instances."""
