"""Placement of rollouts on nodes, delivery of their messages by Celery, and the check of invariants."""
