"""Shared code of tests and benchmarks: private servers, process metrics, leftovers of sandboxes, tables of figures."""
