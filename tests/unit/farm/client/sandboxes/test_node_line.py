"""Calls to an unreachable node report the end of the sandbox, once the farm knows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from farm.client.sandboxes import node_line
from farm.client.sandboxes.node_line import NodeLine, SentCall
from farm.errors import SandboxEnded, ServiceError
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, SandboxAddress, SandboxState
from tests.services.servers.broker import free_ports

RUNS = BorrowedSandbox("sandbox-1", SandboxState.RUNNING, "", "", "n1", "host", 600, 600, 1)


def called(states: list[BorrowedSandbox]) -> None:
    """Call a sandbox on an unreachable node; each query of the store returns the next state, the last one again."""
    [port] = free_ports(1)

    async def find(reference: str) -> tuple[BorrowedSandbox, SandboxAddress | None]:
        state = states.pop(0) if len(states) > 1 else states[0]
        url = f"http://127.0.0.1:{port}"
        return state, None if state.ended else SandboxAddress(reference, "", "n1", url, "token")

    async def call() -> None:
        line = NodeLine(find)
        try:
            await line.call("sandbox-1", SentCall("exec", b"{}", 5))
        finally:
            await line.aclose()

    asyncio.run(call())


def test_sandbox_that_ended_during_a_connection_attempt_is_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_line, "_PATIENCE_S", -1.0)  # over by the end of the first try
    ended = replace(RUNS, state=SandboxState.ENDED, ended_why="its node n1 is away")
    with pytest.raises(SandboxEnded, match="node n1 is away"):
        called([RUNS, ended])


def test_running_sandbox_is_given_up_after_one_more_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_line, "_PATIENCE_S", -1.0)
    with pytest.raises(ServiceError, match="its node n1 cannot be reached"):
        called([RUNS])
