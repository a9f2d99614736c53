"""The presets with the programs themselves: `make test-agents`."""
