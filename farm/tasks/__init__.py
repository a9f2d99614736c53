"""Task folders in common formats: read, checked against the farm's capabilities, and converted to instances."""
