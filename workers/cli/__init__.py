"""Commands that need the workers' code, run as `python -m` by the command line of the farm."""
