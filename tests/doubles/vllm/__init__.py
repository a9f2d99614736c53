"""vLLM's complete wire format, as recorded from 0.32 and published with 0.33, with null fields and error bodies."""
