"""Queries over all rollouts of a batch: its audit, its summary, the times of its stages."""
