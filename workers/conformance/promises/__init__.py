"""The promises of a sandbox, with one module for each group."""
