"""Where the README's figures come from: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
