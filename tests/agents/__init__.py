"""The presets on the programs themselves: `make test-agents`."""
