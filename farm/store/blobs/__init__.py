"""What is stored as bytes: artefacts of rollouts, task archives."""
