"""Scores of answers in words: rules first, a judge where rules end."""
