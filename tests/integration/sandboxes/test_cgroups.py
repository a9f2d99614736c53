"""A sandbox in a control group: the kernel enforces its memory limit, and the group is removed with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxLimits, SandboxSpec
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS, farm_in
from tests.services.farms import farm_folder, until
from workers.sandboxes import cgroups
from workers.sandboxes.lifecycle.reaper import sweep, sweep_all
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.shortage import watched

HOG = "hog = [bytearray(1 << 20) for _ in range(400)]; print('never')"
SMALL = SandboxSpec(limits=SandboxLimits(memory_mb=150))


def _own(line: str) -> Path | None:
    """Return the folder of our own group in a hierarchy, a line of /proc/self/cgroup, in a mount of this node."""
    _, controllers, path = line.split(":", 2)
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = mount.split(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if (kind, controllers) == ("cgroup2", "") or (kind == "cgroup" and controllers in options.split(",") != [""]):
            inside = Path(point) / os.path.relpath(path, root)
            return inside if inside.is_dir() else None
    return None


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    """Yield a group below our own with the memory controller."""
    result = [_own(line) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for parent in filter(None, result):
        made = parent / f"farm-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if (made / "memory.limit_in_bytes").exists() or "memory" in _controllers(made):
                yield made
                return
        finally:
            made.rmdir()
    pytest.skip("no control group with a memory controller is delegated to this user")


def _controllers(made: Path) -> list[str]:
    file = made / "cgroup.controllers"
    return file.read_text().split() if file.exists() else []


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with farm_folder() as made:
        yield made
        remove(made)


@pytest.fixture
def cgroup(group: Path, home: Path, apptainer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FARM_CGROUP", str(group))
    with farm_in(home):
        yield group
        sweep_all(sandbox_config())
        assert [path for path in group.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("kind", PROVIDERS)
def test_kernel_enforces_the_memory_limit(cgroup: Path, kind: str) -> None:
    async def main() -> Path:
        provider = PROVIDERS[kind]()
        hog, neighbour = await asyncio.gather(provider.start("hog", SMALL), provider.start("neighbour", SMALL))
        made = Path(cgroups.of(folder(sandbox_config(), "hog")))
        assert made.parent.parent == cgroup
        assert cgroups.memory_mb(str(made)) == 150
        ended = await hog.exec(["python3", "-c", HOG], timeout_s=30)
        assert (ended.code, ended.stdout, ended.limit) == (-signal.SIGKILL, b"", "memory limit of 150 MB reached")
        assert (await hog.exec(["echo", "hi"], timeout_s=10)).stdout == b"hi\n"
        assert await hog.read_file("/etc/hostname")
        kernel = await hog.open_kernel()
        died = await kernel.run(HOG, 30)
        assert (died.restarted, died.limit) == (True, "memory limit of 150 MB reached")
        quiet = await neighbour.exec(["false"], timeout_s=10)
        assert (quiet.code, quiet.limit) == (1, "")
        await asyncio.gather(hog.stop(), neighbour.stop())
        return made

    assert not asyncio.run(main()).exists()


@pytest.mark.parametrize("kind", PROVIDERS)
def test_sweep_removes_the_cgroup_of_a_killed_monitor(cgroup: Path, kind: str) -> None:
    config = sandbox_config()

    async def killed() -> Path:
        await PROVIDERS[kind]().start("left", SMALL)
        record = SandboxRecord.load(folder(config, "left"))
        assert record
        os.kill(record.monitor.pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not record.first.alive(), "its processes are gone")
        return Path(record.cgroup)

    made = asyncio.run(killed())
    assert made.is_dir()
    assert sweep(config, tuple) == ["left"]
    assert not made.exists()


def test_oom_kill_in_a_foreign_cgroup_is_no_shortage_of_the_node(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another farm or job of the machine reaches its own limit while a stage runs here."""
    state = folder(sandbox_config(), "others")
    state.mkdir(parents=True)
    group = cgroups.make(sandbox_config(), state, 50, 100)
    if not (cgroup / "cgroup.controllers").exists():
        # our own group of version 2 includes its children in its counts, and would not be a foreign one without this
        monkeypatch.delenv("FARM_CGROUP")
        settings.cache_clear()
    with watched(sandbox_config()) as window:
        n_before = _kills_of_the_machine()
        hog = subprocess.Popen([sys.executable, "-c", f"input(); {HOG}"], stdin=subprocess.PIPE)
        Path(group, "cgroup.procs").write_text(str(hog.pid))
        hog.communicate(b"\n")
        assert hog.returncode == -signal.SIGKILL
        assert _kills_of_the_machine() > n_before
        assert window.reason() == ""
    monkeypatch.setenv("FARM_CGROUP", str(cgroup))
    settings.cache_clear()
    cgroups.remove(group)
    remove(state)


def _kills_of_the_machine() -> int:
    lines = Path("/proc/vmstat").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])


def test_missing_memory_controller_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CGROUP", str(home))
    with farm_in(home):
        assert "is neither a control group" in cgroups.missing(sandbox_config())
        with pytest.raises(SandboxError, match="is neither a control group"):
            asyncio.run(PROVIDERS["namespace"]().start("none", SandboxSpec()))
        assert not folder(sandbox_config(), "none").exists()
    settings.cache_clear()
