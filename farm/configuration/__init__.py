"""The file of settings, farm.toml: where it is looked for, and what may stand in it."""
