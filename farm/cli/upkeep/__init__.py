"""Commands for a farm's settings, logs and stored data."""
