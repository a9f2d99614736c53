"""Adapters of environments that others have made: each is loaded in a sandbox that has their packages."""
