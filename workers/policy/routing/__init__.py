"""The choice of an engine for each call: load, health, stickiness, retries."""
