"""Scorers of data sets' authors, each bit for bit as theirs, by the names that rows give them."""
