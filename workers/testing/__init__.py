"""Test doubles for authors of handlers, agents and trainers; they keep the promises of `workers/plugins/interfaces.py`.

`python -m workers.testing.engine` runs a double of an LLM server. `workers.testing.local_sandbox` runs commands on this
machine, without isolation. `workers.conformance` checks the promises of any sandbox.
"""

from __future__ import annotations

from workers.testing.fakes import EchoTool, FakeProvider, FakeSandbox, ScriptedModel, ScriptedPolicy, answering, calling
from workers.testing.noop import ChatHandler, EmptyHandler, NoopAgent, NoopHandler, NoopInstance

__all__ = [
    "ChatHandler",
    "EchoTool",
    "EmptyHandler",
    "FakeProvider",
    "FakeSandbox",
    "NoopAgent",
    "NoopHandler",
    "NoopInstance",
    "ScriptedModel",
    "ScriptedPolicy",
    "answering",
    "calling",
]
