"""Every promise of a sandbox on every kind and on the fake; then promises that only our own kinds make."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import mounts_with, own_seconds, processes_with, python
from tests.services.farms import until
from workers.config import SandboxConfig
from workers.conformance.bench import PROMISES, SURFACE, PromiseBench, chosen
from workers.conformance.outside import left_of
from workers.conformance.trial import NotPermitted, NotTried, Promise
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.images.image import image
from workers.sandboxes.lifecycle.reaper import sweep
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.sandbox_user import give

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

WITHOUT_PROGRAMS = (
    *(
        "written_data_is_read_back",
        "files_are_replaced_atomically",
        "parent_folders_are_created",
        "reading_a_folder_is_a_tool_error",
    ),
    *("a_missing_file_is_a_tool_error", "files_are_read_concurrently", "files_are_uploaded_and_downloaded"),
    *("an_upload_replaces_a_file", "uploading_a_missing_path_is_a_tool_error", "download_never_overwrites"),
    *("downloading_a_missing_path_is_a_tool_error", "calls_after_stop_are_sandbox_errors"),
    "stop_is_idempotent",
)
STARTER = """
import asyncio, sys
from farm.records.request import SandboxSpec
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
sandbox = asyncio.run(PROVIDERS[{kind!r}]().start({sandbox_id!r}, SandboxSpec()))
print("up", flush=True)
sys.stdin.read()
"""


def hold(promise: Promise, bench: PromiseBench, run: Run) -> None:
    try:
        run(bench.hold(promise))
    except NotPermitted as why:
        pytest.skip(str(why))
    except NotTried as why:
        absent(str(why))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_promise(promise: Promise, bench: PromiseBench, run: Run) -> None:
    hold(promise, bench, run)


@pytest.mark.parametrize("promise", chosen([SURFACE]), ids=lambda promise: promise.name)
@pytest.mark.parametrize("provider", ["local"], indirect=True)
def test_promise_without_isolation(promise: Promise, bench: PromiseBench, run: Run) -> None:
    hold(promise, bench, run)


@pytest.mark.parametrize("promise", chosen(only=WITHOUT_PROGRAMS), ids=lambda promise: promise.name)
@pytest.mark.parametrize("provider", ["fake"], indirect=True)
def test_promise_of_the_fake(promise: Promise, bench: PromiseBench, run: Run) -> None:
    hold(promise, bench, run)


def sh(run: Run, sandbox: Sandbox, script: str, timeout_s: float = 10) -> str:
    """Return the output of a script, which must succeed."""
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=timeout_s))
    assert (result.code, result.stderr) == (0, b"")
    return str(result.stdout.decode())


def record_of(sandbox: Sandbox) -> SandboxRecord:
    record = SandboxRecord.load(folder(sandbox_config(), sandbox.sandbox_id))
    assert record
    return record


def test_only_listed_variables_are_set(sandbox: Sandbox, run: Run) -> None:
    seen = run(sandbox.exec(["env"], timeout_s=5)).stdout.decode().splitlines()
    names = {line.partition("=")[0] for line in seen}
    assert names == {"PATH", "HOME", "USER", "LANG", "TERM", "SHELL", "GREETING", "SANDBOX_COMMAND"}
    assert "HOME=/root" in seen


def test_host_image_contains_no_user_data(sandbox: Sandbox, run: Run) -> None:
    script = "ls /home /mnt /srv; test ! -e /etc/shadow; test ! -e /etc/ssh; cat /etc/hostname; cut -d: -f1 /etc/passwd"
    assert sh(run, sandbox, script) == "/home:\n\n/mnt:\n\n/srv:\nsandbox\nroot\nnobody\n"


def test_image_is_never_changed(start: Start, run: Run, config: SandboxConfig) -> None:
    lower = image(config, "host").folder
    before = sorted(str(path) for path in lower.rglob("*"))
    sh(run, start(), "rm -rf /etc/ssl /srv; sed -i s/root/toor/ /etc/passwd; mv /media /media2; echo x > /etc/new")
    assert sorted(str(path) for path in lower.rglob("*")) == before
    assert "toor" not in (lower / "etc/passwd").read_text()


def test_sandbox_that_ends_during_a_command_is_an_error(start: Start, run: Run, config: SandboxConfig) -> None:
    one, seconds = start(), own_seconds()

    async def pulled() -> None:
        running = asyncio.create_task(one.exec(["sleep", seconds], timeout_s=100))
        await asyncio.to_thread(until, lambda: processes_with(f"sleep\0{seconds}\0"), "it runs")
        os.kill(record_of(one).first.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match=one.sandbox_id):
            await running

    run(pulled())
    until(lambda: not folder(config, one.sandbox_id).exists(), "the monitor has removed the folder")


def test_killed_monitor_ends_all_processes_and_is_swept(start: Start, run: Run, config: SandboxConfig) -> None:
    one, seconds = start(), own_seconds()
    sh(run, one, f"(setsid sleep {seconds} >/dev/null 2>&1 &)")
    os.kill(record_of(one).monitor.pid, signal.SIGKILL)
    until(lambda: not processes_with(f"sleep\0{seconds}"), "no process is left")
    assert not mounts_with(one.sandbox_id)
    with pytest.raises(SandboxError):
        run(one.exec(["true"], timeout_s=5))
    others = {path.name for path in config.sandboxes_folder.iterdir()} - {one.sandbox_id}
    assert sweep(config, keep=lambda: others) == [one.sandbox_id]
    assert not left_of(one.sandbox_id)


def test_lifeline_keeps_a_sandbox_after_its_starter_is_killed(
    provider: SandboxProvider, run: Run, config: SandboxConfig
) -> None:
    sandbox_id = f"held-{provider.kind}"
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    code = STARTER.format(kind=provider.kind, sandbox_id=sandbox_id)
    starter = python(code, FARM_LIFELINE_FD=str(read_end), pass_fds=(read_end,))
    assert starter.stdout
    assert starter.stdout.readline() == "up\n"
    starter.kill()
    starter.communicate()
    attached = run(provider.attach(sandbox_id, SandboxSpec()))
    assert sh(run, attached, "echo alive") == "alive\n"
    os.close(write_end)
    until(lambda: not folder(config, sandbox_id).exists(), "the folder is gone")
    os.close(read_end)
    assert not left_of(sandbox_id)


def test_sweep_removes_only_unwanted_and_old_sandboxes(start: Start, run: Run, config: SandboxConfig) -> None:
    kept, unwanted = start(), start()
    new, old = folder(config, "just-made"), folder(config, "long-dead")
    for path in (new, old):
        path.mkdir()
    os.utime(old, (0, 0))
    others = {path.name for path in config.sandboxes_folder.iterdir()} - {
        unwanted.sandbox_id,
        new.name,
        old.name,
    }
    assert sweep(config, keep=lambda: others) == sorted([old.name, unwanted.sandbox_id])
    assert not left_of(unwanted.sandbox_id)
    assert new.exists()
    assert sh(run, kept, "echo alive") == "alive\n"
    assert sweep(config, keep=lambda: others, starting_s=0) == [new.name]


def test_sandbox_started_during_a_sweep_is_kept(start: Start, run: Run, config: SandboxConfig) -> None:
    start()
    before = {path.name for path in config.sandboxes_folder.iterdir()}
    during: list[Sandbox] = []

    def keep() -> set[str]:
        during.append(start())
        return before

    assert sweep(config, keep) == []
    assert sh(run, during[0], "echo alive") == "alive\n"


def test_sandbox_has_its_own_python(sandbox: Sandbox, run: Run) -> None:
    code = "import sys, json; print(json.dumps([sys.version_info[:2], sys.prefix != sys.base_prefix]))"
    for name in ("python", "python3"):
        result = run(sandbox.exec([name, "-c", code], timeout_s=10))
        assert json.loads(result.stdout) == [[3, 11], True], result.stderr
    assert run(sandbox.exec(["python", "-c", "import pydantic"], timeout_s=10)).code == 1


def test_link_in_the_image_does_not_move_the_working_folder(
    provider: SandboxProvider, start: Start, open_folder: Path, config: SandboxConfig
) -> None:
    base = open_folder / f"linked-{provider.kind}"
    base.mkdir()
    for name in ("usr", "etc"):
        (base / name).mkdir()
    for path in image(config, "host").folder.iterdir():
        if path.is_symlink():
            (base / path.name).symlink_to(path.readlink())
    outside = open_folder / f"outside-{provider.kind}"
    (base / "workspace").symlink_to(outside)
    give(base, config.user)
    with pytest.raises(SandboxError):
        start(image=str(base))
    assert not outside.exists()
