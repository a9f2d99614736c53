"""Doubles of LLM servers, exact on the wire: EngineDouble in a test, or `python -m tests.doubles`."""

from tests.doubles.engine_double import EngineDouble, Wire
from tests.doubles.faults import FAULTS

__all__ = ["FAULTS", "EngineDouble", "Wire"]
