"""A farm as those see it who watch it: Flower, metrics, traces, webhooks, progress."""
