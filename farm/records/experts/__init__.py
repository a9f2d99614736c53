"""Routed experts: which experts of a mixture-of-experts model a token was sent to."""
