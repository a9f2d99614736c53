"""A lent sandbox keeps no shell that was not opened completely."""

from __future__ import annotations

import asyncio

import pytest

from farm.errors import NotFound, SandboxError
from farm.records.lending.sandbox_calls import CloseShellCall, OpenShellCall
from workers.config import own_config
from workers.lending.lent_sandbox import LentSandbox
from workers.plugins.interfaces import ShellResult
from workers.testing.fakes import FakeSandbox


class DyingShell:
    """A shell that breaks at its first command."""

    def __init__(self) -> None:
        self.n_closed = 0

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        raise SandboxError("the shell died")

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        raise SandboxError("the shell died")

    async def close(self) -> None:
        self.n_closed += 1


class SlowShell(DyingShell):
    """A shell that is closed before it is open."""

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        return ShellResult(0, "", "/")


class SlowShells(FakeSandbox):
    """A sandbox whose shell opens once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let = asyncio.Event(), asyncio.Event()
        self.shell = SlowShell()

    async def open_shell(self) -> SlowShell:
        self.begun.set()
        await self.let.wait()
        return self.shell


class DyingShells(FakeSandbox):
    """A sandbox whose shells break."""

    def __init__(self) -> None:
        super().__init__()
        self.shells: list[DyingShell] = []

    async def open_shell(self) -> DyingShell:
        self.shells.append(DyingShell())
        return self.shells[-1]


def test_shell_whose_first_command_fails_is_closed_and_its_name_is_free() -> None:
    sandbox = DyingShells()

    async def opened_twice() -> None:
        lent = LentSandbox(own_config().sandboxes, sandbox, "token", 600)
        for _ in range(2):
            with pytest.raises(SandboxError, match="the shell died"):
                await lent.answer(OpenShellCall(session="one"), "")
        with pytest.raises(NotFound, match="no shell 'one'"):
            await lent.answer(CloseShellCall(session="one"), "")

    asyncio.run(opened_twice())
    assert [shell.n_closed for shell in sandbox.shells] == [1, 1]


def test_shell_that_is_closed_while_it_opens_is_not_left_behind() -> None:
    async def closed_early() -> int:
        sandbox = SlowShells()
        lent = LentSandbox(own_config().sandboxes, sandbox, "token", 600)
        opening = asyncio.create_task(lent.answer(OpenShellCall(session="one"), ""))
        await sandbox.begun.wait()
        await lent.answer(CloseShellCall(session="one"), "")
        sandbox.let.set()
        with pytest.raises(NotFound, match="closed while"):
            await opening
        return sandbox.shell.n_closed

    assert asyncio.run(closed_early()) == 1
