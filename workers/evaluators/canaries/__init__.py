"""Canaries: the farm's own tests with known outcomes, mixed among a project's tests."""
