"""verifiers and prime-rl: their env server on the farm, for an environment that has verifiers installed."""
