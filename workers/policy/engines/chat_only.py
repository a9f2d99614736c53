"""Any other OpenAI-compatible server: it supports chat, and may accept token ids as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.engine import EngineInfo
from workers.policy.engines.connection import EngineConnection
from workers.policy.engines.kind import EngineKind, Identity
from workers.policy.engines.vllm import CompletionsWire
from workers.policy.engines.wire import Wire


class _PlainCompletions(CompletionsWire):
    """vLLM's wire at a server that may not support more than ids."""

    takes_guides = False
    lacks = frozenset({"routed_experts"})


class ChatOnlyKind(EngineKind):
    """The kind of servers that no other kind recognises."""

    is_fallback = True

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        return Identity()

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (_PlainCompletions(),)
