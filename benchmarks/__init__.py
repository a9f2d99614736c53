"""Benchmarks for docs/concepts/figures.md and the README: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
