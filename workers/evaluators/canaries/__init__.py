"""Canaries: tests of ours that stand among a project's own, of which the outcome is known."""
