"""Observing a farm: Flower, metrics, traces, webhooks, progress."""
