"""Counterparts of the clients of other systems' protocols, written after their sources."""
