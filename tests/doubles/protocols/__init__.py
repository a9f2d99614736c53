"""Counterparts of the clients of other systems' protocols, made from what their sources do."""
