"""The ways to a farm: in this process on its store, or over HTTP to its API, with one list of verbs."""
