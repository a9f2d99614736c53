"""vLLM's wire for token ids, as published with 0.33: null fields included, and the errors' bodies."""
