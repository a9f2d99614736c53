"""Multi-step environments: their contract, the server that runs them in a sandbox, and the node's side of it."""
