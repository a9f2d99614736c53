"""Clients of a farm: directly on its store, or over HTTP to its API, with the same verbs."""
