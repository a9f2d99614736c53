"""The scripted engine, a test double: `python -m workers.testing.engine`, or `EngineDouble` in a test."""

from workers.testing.engine.double import MODEL, EngineDouble
from workers.testing.engine.faults import FAULTS
from workers.testing.engine.model_text import write_model_text
from workers.testing.engine.vllm.sampling import FINGERPRINT

__all__ = ["FAULTS", "FINGERPRINT", "MODEL", "EngineDouble", "write_model_text"]
