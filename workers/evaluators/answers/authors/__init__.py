"""Scorers of data sets' authors, reproduced exactly, by their names in rows."""
