"""The cases that oracles are given, written by hand or generated."""
