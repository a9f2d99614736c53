"""Annotations of rollouts, written and read by trainers."""
