"""Shared by tests and benchmarks: private servers, measures of processes, leftovers of sandboxes, tables of figures."""
