"""The scripted engine, a double of an LLM server: `python -m workers.testing.engine`, or ScriptedEngine in a test."""

from workers.testing.engine.model_text import write_model_text
from workers.testing.engine.scripted_engine import MODEL, ScriptedEngine

__all__ = ["MODEL", "ScriptedEngine", "write_model_text"]
