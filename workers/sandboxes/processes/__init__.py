"""Start, monitoring and end of processes inside a sandbox by the worker."""
