"""vLLM's whole wire, as recorded from 0.32 and published with 0.33: null fields included, and the errors' bodies."""
