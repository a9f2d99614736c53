"""Scores: the rewards of single rows and turns."""
