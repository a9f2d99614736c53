"""The settings file farm.toml: its location and contents."""
