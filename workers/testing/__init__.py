"""Fakes for people who write handlers, agents and trainers; they keep the promises of `workers/interfaces.py`.

`python -m workers.testing.engine` is a double of an LLM server. `workers.testing.local` is a sandbox that is none, and
`workers.testing.promises` tries what every sandbox promises.
"""

from __future__ import annotations

from workers.testing.chat import ChatHandler
from workers.testing.fakes import EchoTool, FakeProvider, FakeSandbox, ScriptedPolicy, answering, calling
from workers.testing.noop import NoopAgent, NoopHandler, NoopInstance

__all__ = [
    "ChatHandler",
    "EchoTool",
    "FakeProvider",
    "FakeSandbox",
    "NoopAgent",
    "NoopHandler",
    "NoopInstance",
    "ScriptedPolicy",
    "answering",
    "calling",
]
