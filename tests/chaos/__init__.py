"""Chaos: a farm under load loses its parts at random, in a seeded order, and must keep every promise."""
