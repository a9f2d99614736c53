"""The promises of a sandbox, a module for each group."""
