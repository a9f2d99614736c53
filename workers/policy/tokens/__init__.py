"""Token-in/token-out conversations: sampled ids are kept, and only new text is rendered and encoded."""
