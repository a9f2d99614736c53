"""Adapters of third-party environments: each is loaded in a sandbox that has the environment's packages."""
