"""Clients of LLM servers: requests, control and detection, for each kind of server."""

from workers.policy.engines.capabilities import detect
from workers.policy.engines.client import open_engine

__all__ = ["detect", "open_engine"]
