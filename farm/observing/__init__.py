"""Consequences of the end of rollouts and batches, for those who watch a farm from outside."""
