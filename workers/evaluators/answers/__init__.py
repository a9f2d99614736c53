"""Scores of free-text answers: rules first, then a judge if rules cannot decide."""
