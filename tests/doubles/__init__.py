"""Doubles of LLM servers with exact wire formats: EngineDouble in a test, or `python -m tests.doubles`."""

from tests.doubles.engine_double import EngineDouble, Wire
from tests.doubles.faults import FAULTS

__all__ = ["FAULTS", "EngineDouble", "Wire"]
