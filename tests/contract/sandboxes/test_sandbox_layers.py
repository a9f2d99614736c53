"""Layers prepared once for all samples of an instance: their visibility, isolation from each other, and removal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farm.errors import HandlerError, SandboxError
from farm.ids import prepare_sandbox_id
from farm.records.request import SandboxSpec
from testkit.scratch_folder import sandbox_config
from tests.services.farms import until
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.launch_plan import prepare
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.lifecycle.state import folder
from workers.sandboxes.provider import NodeSandboxProvider
from workers.sandboxes.sandbox import NodeSandbox

Run = Callable[[Any], Any]
STAGE = """
set -e
mkdir -p tree/deep/er; echo prepared > tree/file; echo two > tree/deep/er/two; ln -s file tree/link
ln tree/file tree/hard; chmod 640 tree/file; echo root > /root/.profile; chmod 000 tree/deep/er/two
rm -r /usr/local/share || true; rm -rf /srv; mkdir /opt/new; sed -i s/root/toor/ /etc/passwd
rm -r /media; mkdir /media; echo in > /media/in
"""
"""Leaves a file of each type, a whiteout of a deleted folder, and a folder that hides one of the image."""


class _Stage:
    """Prepares, and counts how often."""

    def __init__(self, script: str = STAGE, fail: int = 0) -> None:
        self.n = 0
        self._script = script
        self._fail = fail

    async def __call__(self, sandbox: Sandbox) -> None:
        self.n += 1
        if self.n <= self._fail:
            raise HandlerError("not today")
        result = await sandbox.exec(["bash", "-c", self._script], timeout_s=20)
        assert result.code == 0, result.stderr


@pytest.fixture
def siblings(provider: NodeSandboxProvider, run: Run, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Yield a function that starts sandboxes with a shared preparation; they end with the test."""
    config = sandbox_config()
    started: list[NodeSandbox] = []

    def start(n: int, stage: _Stage, **fields: Any) -> list[NodeSandbox]:
        async def together() -> list[NodeSandbox]:
            names = [f"sibling-{provider.kind}-{len(started) + number}" for number in range(n)]
            spec, what = SandboxSpec(**fields), request.node.name
            return await asyncio.gather(*(provider.start_prepared(name, spec, what, stage) for name in names))

        result: list[NodeSandbox] = run(together())
        started.extend(result)
        return result

    yield start
    for sandbox in started:
        run(sandbox.stop())
    layers.sweep(config, 0.0)
    assert not list(config.layers_folder.iterdir())


def sh(run: Run, sandbox: Sandbox, script: str) -> str:
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=20))
    assert (result.code, result.stderr) == (0, b"")
    return str(result.stdout.decode())


def names() -> set[str]:
    result = sandbox_config().layers_folder
    return {path.name for path in result.iterdir()} if result.is_dir() else set()


def test_layer_is_prepared_once_and_visible_to_all(siblings: Callable[..., Any], run: Run) -> None:
    stage = _Stage()
    result = siblings(4, stage) + siblings(1, stage)
    assert stage.n == 1
    for sandbox in result:
        assert sh(run, sandbox, "cat tree/link tree/hard; stat -c '%a %h %u' tree/file; cat tree/deep/er/two") == (
            "prepared\nprepared\n640 2 0\ntwo\n"
        )
        assert sh(run, sandbox, "ls /media /opt; grep -c toor /etc/passwd; cat /root/.profile") == (
            "/media:\nin\n\n/opt:\nnew\n1\nroot\n"
        )
        assert sh(run, sandbox, "test ! -e /srv && echo deleted") == "deleted\n"


def test_preparing_sandbox_is_removed(siblings: Callable[..., Any], config: SandboxConfig) -> None:
    (sandbox,) = siblings(1, _Stage())
    assert not folder(config, prepare_sandbox_id(sandbox.sandbox_id)).exists()
    assert len(names()) == 1


def test_siblings_do_not_see_each_others_changes(siblings: Callable[..., Any], run: Run) -> None:
    one, two = siblings(2, _Stage())
    sh(run, one, "rm -rf tree/deep /media; echo changed > tree/file; mv tree moved; echo mine > new; mkdir /srv")
    assert sh(run, one, "ls; cat moved/file; ls -d /srv") == "moved\nnew\nchanged\n/srv\n"
    for sandbox in (two, *siblings(1, _Stage("exit 1"))):
        assert sh(run, sandbox, "ls; cat tree/file; ls tree/deep /media; test ! -e /srv") == (
            "tree\nprepared\n/media:\nin\n\ntree/deep:\ner\n"
        )


def test_prepared_files_can_be_deleted(siblings: Callable[..., Any], run: Run) -> None:
    (one,) = siblings(1, _Stage())
    assert sh(run, one, "rm -rf tree /root/.profile /opt/new; ls -A . /opt; test ! -e /root/.pro*") == ".:\n\n/opt:\n"
    assert sh(run, one, "mkdir tree; ls -A tree; echo again > tree/file; cat tree/file; rm -r tree; ls") == "again\n"


def test_scoring_sandbox_has_no_prepared_layer(
    provider: NodeSandboxProvider, siblings: Callable[..., Any], run: Run
) -> None:
    siblings(1, _Stage())
    fresh = run(provider.start("fresh", SandboxSpec()))
    assert sh(run, fresh, "ls -A; ls /opt; grep -c toor /etc/passwd || true") == "0\n"
    run(fresh.stop())


def test_different_spec_is_prepared_separately(siblings: Callable[..., Any], run: Run) -> None:
    stage = _Stage("echo $PWD > /where")
    (one,) = siblings(1, stage)
    (two,) = siblings(1, stage, workdir="/other")
    assert (sh(run, one, "cat /where"), sh(run, two, "cat /where"), stage.n) == ("/workspace\n", "/other\n", 2)


def test_failed_preparation_is_reported_and_retried(
    siblings: Callable[..., Any], run: Run, config: SandboxConfig
) -> None:
    stage = _Stage(fail=1)
    with pytest.raises(HandlerError, match="not today"):
        siblings(1, stage)
    assert not names()
    assert not [path for path in config.sandboxes_folder.iterdir() if path.name.endswith(".prepare")]
    siblings(1, stage)
    assert stage.n == 2


def test_cancelled_preparation_leaves_nothing(provider: NodeSandboxProvider, run: Run, config: SandboxConfig) -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()

        async def stage(sandbox: Sandbox) -> None:
            begun.set()
            await sandbox.exec(["sleep", "100"], timeout_s=100)

        starting = asyncio.create_task(provider.start_prepared("cancelled", SandboxSpec(), "cancelled", stage))
        await begun.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(cancelled())
    until(lambda: not folder(config, prepare_sandbox_id("cancelled")).exists(), "the sandbox is gone")
    assert not names()


def test_layer_in_use_is_not_removed(
    provider: NodeSandboxProvider, siblings: Callable[..., Any], run: Run, config: SandboxConfig
) -> None:
    (one,) = siblings(1, _Stage())
    (name,) = names()
    place = config.layers_folder / name
    layers.sweep(config, 0.0)
    assert sh(run, one, "cat tree/file") == "prepared\n"
    run(one.stop())
    with layers.held(config, name) as files:
        assert files == place / "files"
        layers.sweep(config, 0.0)
        assert place.exists()
    layers.sweep(config, 60.0)
    assert place.exists(), "it was used a moment ago"
    os.utime(place, (0, 0))
    layers.sweep(config, 60.0)
    assert not place.exists()
    with layers.held(config, name) as files:
        assert files is None
    with pytest.raises(SandboxError, match="is gone"):
        provider.recipe(SandboxSpec(), name).start("too-late")


def test_siblings_use_pooled_sandboxes(
    provider: NodeSandboxProvider, siblings: Callable[..., Any], run: Run, config: SandboxConfig
) -> None:
    stage = _Stage()
    (one,) = siblings(1, stage)
    (name,) = names()
    path = provider.recipe(SandboxSpec(), name).fill_warm_pool(prepare(config, SandboxSpec()))
    run(one.stop())
    layers.sweep(config, 0.0)
    assert names() == {name}, "the one in stock stands on it"
    plain = run(provider.start("plain", SandboxSpec()))
    assert path.exists(), "only siblings may have it"
    run(plain.stop())
    (two,) = siblings(1, stage)
    assert not path.exists()
    assert sh(run, two, "cat tree/file; rm -r tree; ls -A") == "prepared\n"
    assert stage.n == 1
    assert not warm_pool.ready(config)


def test_unfinished_layers_are_removed(siblings: Callable[..., Any], config: SandboxConfig) -> None:
    siblings(1, _Stage())
    for left in (".new.1234", ".gone.1234"):
        (config.layers_folder / left / "files").mkdir(parents=True)
    os.utime(config.layers_folder / ".new.1234", (0, 0))
    layers.sweep(config, 60.0)
    assert len(names()) == 1
