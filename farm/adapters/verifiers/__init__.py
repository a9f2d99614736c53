"""verifiers and prime-rl: their env server with the farm behind it, in an environment that has verifiers."""
