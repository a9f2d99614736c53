"""vLLM's wire for token ids as of 0.33, including null fields and error bodies."""
