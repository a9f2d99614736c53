"""Sandboxes with a separate user id on the node: for root, with reserved ids and id-mapped mounts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.conftest import Run, Start
from tests.contract.sandboxes.sandbox_kinds import SANDBOX_IDS
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.lifecycle.user_ids import own_id
from workers.sandboxes.sandbox_user import sandbox_user

_DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid():
        pytest.skip("only root can give sandboxes user ids of their own")


@pytest.fixture
def one_id(sandbox_settings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the only id available for sandboxes."""
    first = int(SANDBOX_IDS.partition(":")[0]) + 60_000 + os.getpid() % 60_000
    monkeypatch.setenv("FARM_SANDBOX_IDS", f"{first}:1")
    settings.cache_clear()
    yield first
    monkeypatch.undo()
    settings.cache_clear()


def owner(sandbox: Sandbox) -> int:
    """Return the user of a sandbox's first process."""
    record = SandboxRecord.load(folder(sandbox_config(), sandbox.sandbox_id))
    assert record
    return Path(f"/proc/{record.first.pid}").stat().st_uid


def shared() -> int:
    user = sandbox_user(sandbox_config().user)
    assert user
    return user[0]


def test_each_sandbox_has_its_own_user_id(start: Start) -> None:
    first, count = map(int, SANDBOX_IDS.split(":"))
    ids = {owner(start()) for _ in range(3)}
    assert len(ids) == 3
    assert ids <= set(range(first, first + count))


def test_files_belong_to_the_sandbox_user_on_disk(start: Start, run: Run, config: SandboxConfig) -> None:
    sandbox = start()
    run(sandbox.write_file("/root/new", b"new"))
    run(sandbox.exec(["bash", "-c", "echo x >>/etc/passwd; mkdir /a; mv /etc/hostname /a; chmod 0 /a"], timeout_s=20))
    upper = folder(config, sandbox.sandbox_id) / "upper"
    assert {path.lstat().st_uid for path in (upper, *upper.rglob("*"))} == {shared()}
    seen = run(sandbox.exec(["stat", "-c", "%u:%g", "/", "/etc/passwd", "/root/new", "/run/farm"], timeout_s=20))
    assert set(seen.stdout.split()) == {b"0:0"}


def test_user_id_is_exclusive_and_reused_after_the_sandbox_ends(
    one_id: int, start: Start, run: Run, config: SandboxConfig
) -> None:
    sandbox = start()
    assert owner(sandbox) == one_id
    assert owner(start()) == shared(), "all others are taken"
    run(sandbox.stop())
    again = start()
    assert owner(again) == one_id
    record = SandboxRecord.load(folder(config, again.sandbox_id))
    assert record
    os.kill(record.monitor.pid, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE_S
    while own(one_id) != one_id:
        assert time.monotonic() < deadline, "the id of a sandbox whose monitor was killed is held still"
        time.sleep(0.02)


def own(_: int) -> int:
    with own_id(sandbox_config(), [str(settings().scratch)]) as (number, _held):
        return number


def test_sandboxes_with_and_without_own_id_share_an_image(one_id: int, start: Start, run: Run) -> None:
    """They share the image, first of all; inside, both own it, whichever user made it."""
    for sandbox in (start(), start()):
        done = run(sandbox.exec(["bash", "-c", "rm -r /etc/ssl /opt; echo fine >/etc/passwd"], timeout_s=20))
        assert (done.code, done.stderr) == (0, b"")


def test_unmappable_file_system_is_shared_by_one_user(
    sandbox_settings: None, caplog: pytest.LogCaptureFixture, config: SandboxConfig
) -> None:
    """The kernel's own file system stands for all without id-mapped mounts."""
    scratch = settings().scratch
    scratch.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with own_id(config, [str(scratch), "/proc"]) as (number, held):
            assert (number, held) == (0, [])
    assert len([line for line in caplog.messages if "/proc share one user" in line]) <= 1


@pytest.mark.parametrize("chosen", ["1:5000000000", "4294967295:1"])
def test_invalid_id_ranges_are_refused(chosen: str, sandbox_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SANDBOX_IDS", chosen)
    settings.cache_clear()
    with pytest.raises(SandboxError, match="FARM_SANDBOX_IDS"), own_id(sandbox_config(), []):
        pass
    monkeypatch.undo()
    settings.cache_clear()


def test_ordinary_user_needs_no_root_rights_in_ci() -> None:
    promise = "test_sandbox.py::test_promise[namespace-per_user_limits_apply_to_each_sandbox]"
    tried = [f"{__file__}::test_unmappable_file_system_is_shared_by_one_user", str(Path(__file__).with_name(promise))]
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tried]
    done = subprocess.run(
        ["unshare", "--user", "--map-user=1000", "--map-group=1000", *pytest_words],
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, "2 skipped" in done.stdout) == (0, True), done.stdout + done.stderr
