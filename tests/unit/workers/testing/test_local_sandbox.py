from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from farm.errors import SandboxError, ToolError
from farm.records.request import SandboxSpec
from tests.contract.sandboxes.sandbox_kinds import own_seconds
from tests.services.farms import until
from workers.conformance.outside import descriptors, processes_with
from workers.plugins.interfaces import Sandbox
from workers.testing.local_sandbox import LocalProvider


def using(use: Callable[[Sandbox], Awaitable[None]], **fields: object) -> None:
    """Run a coroutine on a local sandbox, and stop the sandbox."""

    async def all_of_it() -> None:
        sandbox = await LocalProvider().start("local", SandboxSpec.model_validate(fields))
        try:
            await use(sandbox)
        finally:
            await sandbox.stop()

    asyncio.run(all_of_it())


def test_working_folder_has_two_names() -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write_file("/testbed/a/file", b"x")
        assert await sandbox.read_file("a/file") == b"x"
        assert (await sandbox.exec(["cat", "a/file"], timeout_s=5)).stdout == b"x"
        assert await sandbox.read_file(f"{sandbox.workdir}/a/file") == b"x"  # type: ignore[attr-defined]

    using(use, workdir="/testbed")


@pytest.mark.parametrize("path", ["/etc/hostname", "../../etc/hostname", "/workspacex", "a/../../b"])
def test_files_outside_are_refused(path: str, tmp_path: Path) -> None:
    async def use(sandbox: Sandbox) -> None:
        for call in (
            sandbox.read_file(path),
            sandbox.write_file(path, b""),
            sandbox.upload(tmp_path, path),
            sandbox.download(path, tmp_path / "new"),
        ):
            with pytest.raises(ToolError, match="has only its working folder"):
                await call

    using(use)


def test_stopped_sandbox_leaves_nothing() -> None:
    started: list[Sandbox] = []
    seconds = own_seconds()

    async def use(sandbox: Sandbox) -> None:
        started.append(sandbox)
        await sandbox.exec(["bash", "-c", f"setsid sleep {seconds} >/dev/null 2>&1 &"], timeout_s=5)
        await asyncio.to_thread(until, lambda: processes_with(f"sleep\0{seconds}"), "it runs")

    using(use)
    assert not processes_with(f"sleep\0{seconds}")
    assert not started[0].socket_folder.exists()


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_POLICY_KEY", "a-secret")

    async def use(sandbox: Sandbox) -> None:
        assert b"a-secret" not in (await sandbox.exec(["env"], timeout_s=5)).stdout

    using(use)


def test_sandbox_is_found_only_by_its_own_provider() -> None:
    async def all_of_it() -> None:
        provider = LocalProvider()
        sandbox = await provider.start("one", SandboxSpec())
        assert await provider.attach("one", SandboxSpec()) is sandbox
        with pytest.raises(SandboxError, match="one"):
            await provider.start("one", SandboxSpec())
        with pytest.raises(SandboxError, match="one"):
            await LocalProvider().attach("one", SandboxSpec())
        await sandbox.stop()
        with pytest.raises(SandboxError, match="one"):
            await provider.attach("one", SandboxSpec())

    asyncio.run(all_of_it())


def test_sandbox_leaks_no_descriptors() -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.exec(["true"], timeout_s=5)
        before, n_rounds = descriptors(), 20
        for _ in range(n_rounds):
            await sandbox.exec(["cat"], timeout_s=5, stdin=b"x" * 100_000)
            await sandbox.exec(["/no/such/program", "x" * 100_000], timeout_s=5)
        # a leak leaves one per round; other threads of this process may open one or two meanwhile
        assert descriptors() - before < n_rounds

    using(use)
