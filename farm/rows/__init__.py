"""Reads data set rows in trainers' formats into instances: `read_rows(path, form)`."""

from farm.rows.loaded_rows import LoadedRows, read_rows

__all__ = ["LoadedRows", "read_rows"]
