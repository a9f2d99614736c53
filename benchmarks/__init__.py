"""Benchmarks behind the figures of README and docs/figures.md: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
