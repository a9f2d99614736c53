"""Scores: rewards of rollouts, rows and turns."""
