"""Problems that the programs ask the tests' farm for: ones with an answer by chance, and ones that the farm breaks."""

from __future__ import annotations

from farm.records.request import Instance


def chat(name: str) -> Instance:
    """A problem that the scripted engine answers rightly or not, by chance."""
    return Instance(data_source="chat", fields={"question": "How many hops?", "expected": "three"}, instance_id=name)


def breaking(name: str) -> Instance:
    """A problem that the farm breaks, whoever plays it."""
    return Instance(data_source="noop", fields={"fail": "run:engine_error"}, instance_id=name)
