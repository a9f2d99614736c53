"""Backups of a store: one SQLite file, whichever database it is of, and whichever it is restored into."""
