"""Scores of programs by hidden tests: one process per test; results are compared where no policy program runs."""
