"""Clients of LLM servers: how each kind is asked, paused and found out."""

from workers.policy.engines.detection import detect
from workers.policy.engines.served import open_engine

__all__ = ["detect", "open_engine"]
