"""Backups of a store, each one SQLite file; the backup and the store it is restored to may use any database."""
