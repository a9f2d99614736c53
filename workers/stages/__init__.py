"""The init, run and eval stages of a rollout, and the parts of them that only some handlers need."""
