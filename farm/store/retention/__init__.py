"""Retention: pruning of old batches, and the error for requests for pruned data."""
