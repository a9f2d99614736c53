"""Well-known agent programs, unmodified: each is a `Harness`, which defines its packages and its command."""
