"""Scores of programs by hidden tests: each a process of its own, compared where no program of the policy runs."""
