"""Problems that the programs request from the tests' farm: with a random answer, and with a failure of the farm."""

from __future__ import annotations

from farm.records.request import Instance


def chat(name: str) -> Instance:
    """A problem that the scripted engine answers correctly or not, at random."""
    return Instance(data_source="chat", fields={"question": "How many hops?", "expected": "three"}, instance_id=name)


def breaking(name: str) -> Instance:
    """A problem whose rollouts always fail in the farm."""
    return Instance(data_source="noop", fields={"fail": "run:engine_error"}, instance_id=name)
