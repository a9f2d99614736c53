"""Token-in/token-out conversations: sampled ids are held, and only what is new is rendered and encoded."""
