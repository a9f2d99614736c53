"""Bytes in the store: artefacts of rollouts, task archives."""
