"""The farm over HTTP. Everything is in the store: any number of these may run, and each may be killed at any moment."""
