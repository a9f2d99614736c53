"""Programs that promises run inside a sandbox, in its own Python: standard library only, no module of the farm."""
