"""Processes inside a sandbox, as the worker starts, awaits and ends them."""
