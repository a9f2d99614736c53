"""Routed experts: which experts of a mixture-of-experts model processed a token."""
