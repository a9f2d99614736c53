"""A SIGTERM to every process of a node, as Slurm sends it: starting helpers survive, and no attempt counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Retry

from farm.errors import RolloutError, SandboxError, StaleRollout
from farm.records.request import SandboxSpec
from farm.records.rollout import Stage
from farm.store.rollouts import Claim
from workers.queue import app
from workers.queue.tasks import StageFailed, UnfinishedStage
from workers.sandboxes.kernel.zygote_pool import zygote_pool
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.processes.process_tree import children


@contextlib.contextmanager
def signal_all_children(but: Collection[int]) -> Iterator[None]:
    """Send SIGTERM repeatedly to all direct children of this process, from their first moment on.

    Its children `but` are skipped: servers that all tests of a process share are not part of a node.
    """
    ended = threading.Event()

    def signal_them() -> None:
        while not ended.wait(0.002):
            for pid in set(children(os.getpid())).difference(but):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    thread = threading.Thread(target=signal_them)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_starting_helper_processes_survive_a_sigterm_to_all(provider: NamespaceProvider) -> None:
    servers = children(os.getpid())

    async def tried() -> None:
        sandbox = await provider.start("signalled", SandboxSpec())
        try:
            with signal_all_children(but=servers):
                for _ in range(4):
                    fork_client()._end()
                    assert (await sandbox.exec(["echo", "hi"], timeout_s=30)).stdout == b"hi\n"
                    shell = await sandbox.open_shell()
                    assert (await shell.run("echo hi", 30)).output == "hi\n"
                    await shell.close()
                for _ in range(2):
                    for zygote in zygote_pool().living():
                        zygote.close()
                    kernel = await sandbox.open_kernel()
                    assert (await kernel.run("print('hi')", 60)).output == "hi\n"
                    await kernel.close()
        finally:
            await sandbox.stop()

    asyncio.run(tried())


def test_programs_in_a_sandbox_receive_sigterm(provider: NamespaceProvider) -> None:
    code = "import subprocess as s\np = s.Popen(['sleep', '60'])\np.terminate()\nprint(p.wait(20))"

    async def tried() -> None:
        sandbox = await provider.start("heeding", SandboxSpec())
        try:
            result = await sandbox.exec(["bash", "-c", "sleep 60 & kill $!; wait $!"], timeout_s=30)
            assert result.code == 128 + signal.SIGTERM
            shell = await sandbox.open_shell()
            assert (await shell.run("sleep 60 & kill $!; wait $!", 30)).code == 128 + signal.SIGTERM
            kernel = await sandbox.open_kernel()
            assert (await kernel.run(code, 60)).output == f"-{int(signal.SIGTERM)}\n"
        finally:
            await sandbox.stop()

    asyncio.run(tried())


class _Store:
    """Records the budget of an attempt's end."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def write(self, work: Any, *, batch_id: str, rollout_id: str) -> None:
        self.causes.append(work.keywords["failure"].kind)


@pytest.mark.parametrize(
    ("error", "draining", "signalled", "cause", "end"),
    [
        (SandboxError("the fork server was killed"), False, False, "sandbox_error", StageFailed),
        (SandboxError("the fork server was killed"), True, False, "drained", Retry),
        (SandboxError("the fork server was killed"), False, True, "drained", Retry),
        (StaleRollout("newer weights", restart=True), True, True, "stale", StageFailed),
    ],
)
def test_error_during_node_shutdown_costs_no_attempt(
    error: RolloutError, draining: bool, signalled: bool, cause: str, end: type[Exception]
) -> None:
    store = _Store()
    options = SimpleNamespace(retry_s=1.0, node_timeout_s=10.0)
    me = SimpleNamespace(leases=SimpleNamespace(draining=draining), store=store, options=options)
    claim = Claim("b1.0.0", 1, Stage.RUN, "n/run/1", "b1", 0, 0, "n", None, None)
    if signalled:
        app._ignore(signal.SIGTERM, None)
    try:
        with pytest.raises(end):
            UnfinishedStage(me, claim).broke(error)  # type: ignore[arg-type]
    finally:
        app._shutdown_requested_at.clear()
    assert store.causes == [cause]
