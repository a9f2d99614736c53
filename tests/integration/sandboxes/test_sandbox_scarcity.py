"""A full disk, no descriptors, no processes: a failed start of a sandbox is one clear error, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import farm_folder
from tests.services.soak import repeats
from workers.sandboxes.lifecycle.reaper import sweep_all
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.remove_tree import remove

ROOT = Path(__file__).parents[3]
SCARCE = """
import asyncio, os, resource
from farm.errors import FarmError
from farm.records.request import SandboxSpec
from workers.sandboxes.namespace import NamespaceProvider

async def main():
    provider = NamespaceProvider()
    sandbox = await provider.start("first", SandboxSpec())
    await sandbox.exec(["true"], timeout_s=10)
    before = sorted(os.listdir("/proc/self/fd"))
    old = resource.getrlimit({limit})
    resource.setrlimit({limit}, ({value}, old[1]))
    work = [sandbox.exec(["sleep", "0.5"], timeout_s=20) for _ in range(40)]
    work += [provider.start(f"other{{n}}", SandboxSpec()) for n in range(20)]
    found = await asyncio.gather(*work, return_exceptions=True)
    resource.setrlimit({limit}, old)
    for one in found:
        print("error" if isinstance(one, Exception) else "ok", type(one).__name__, " ".join(str(one).split()))
    for other in found[40:]:
        if not isinstance(other, Exception):
            await other.stop()
    print("after", (await sandbox.exec(["echo", "hi"], timeout_s=20)).stdout)
    await sandbox.stop()
    left = os.listdir(provider.config.sandboxes_folder)
    print("descriptors", sorted(os.listdir("/proc/self/fd")) == before, "folders", left)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if missing := NamespaceProvider().missing():
        absent(missing)
    with farm_folder() as made, farm_in(made):
        yield made
        sweep_all(sandbox_config())
        remove(made)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    scratch = folder / "small"
    scratch.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=711", "tmpfs", scratch], check=True)
    try:
        with pytest.MonkeyPatch.context() as patch, farm_in(folder):
            from farm.settings import settings

            patch.setenv("FARM_SCRATCH", str(scratch))
            settings.cache_clear()
            yield scratch
    finally:
        subprocess.run(["umount", "-l", scratch], check=True)
        scratch.rmdir()


@pytest.mark.parametrize("option", ["size", "nr_inodes"])
def test_start_on_a_full_disk_is_one_error_and_leaves_nothing(folder: Path, option: str) -> None:
    """Full at each step of a start in turn, from the first file of its folder to the last mount point."""
    provider = NamespaceProvider()

    async def start_and_stop(sandbox_id: str) -> str:
        try:
            sandbox = await provider.start(sandbox_id, SandboxSpec())
        except SandboxError as error:
            return str(error)
        await sandbox.stop()
        return ""

    with small_disk(folder) as scratch:
        assert asyncio.run(start_and_stop("roomy")) == ""
        result = set()
        used = os.statvfs(scratch)
        for room in range(1, 200, 3):
            value = used.f_files - used.f_ffree + room if option == "nr_inodes" else f"{4 * room}k"
            subprocess.run(["mount", "-o", f"remount,{option}={value}", scratch], check=True)
            error = asyncio.run(start_and_stop(f"tight{room}"))
            result.add(error.replace(f"tight{room}", "ID"))
            assert list(sandbox_config().sandboxes_folder.iterdir()) == [], error
            if not error:
                break
        assert "" in result, "with room enough it starts"
        assert len(result) > 1
        assert all("the disk is full" in error for error in result - {""}), result


def starts_with_limit(folder: Path, limit: str, value: int) -> list[str]:
    code = SCARCE.format(limit=f"resource.{limit}", value=value)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["after b'hi\\n'", "descriptors True folders []"], lines
    return lines[:-2]


def test_start_without_file_descriptors_is_a_sandbox_error(folder: Path) -> None:
    lines = starts_with_limit(folder, "RLIMIT_NOFILE", 100)
    errors = [line for line in lines if line.startswith("error")]
    assert 0 < len(errors) < len(lines)
    assert [line for line in errors if "SandboxError" not in line] == []
    assert any("ulimit -n" in line for line in errors), errors


def test_start_without_processes_is_a_sandbox_error(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may have as many as it likes")
    running = len([entry for entry in Path("/proc").glob("[0-9]*/task/*") if entry.stat().st_uid == os.geteuid()])
    # those of the fork server, which does not exist yet when the limit is set
    errors = [line for line in starts_with_limit(folder, "RLIMIT_NPROC", running + 4) if line.startswith("error")]
    assert [line for line in errors if "SandboxError" not in line] == []


def descriptors() -> set[str]:
    """Return this process's own by number; one of them belongs to the query itself."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.soak
def test_repeated_sandboxes_leak_no_descriptor(folder: Path) -> None:
    provider = NamespaceProvider()

    async def life(n: int) -> None:
        sandbox = await provider.start(f"life{n}", SandboxSpec())
        assert (await sandbox.exec(["cat"], stdin=b"x", timeout_s=10)).stdout == b"x"
        assert (await sandbox.exec(["sleep", "60"], timeout_s=0.01)).timed_out
        assert (await sandbox.exec(["no-such-program"], timeout_s=10)).code == 127
        shell = await sandbox.open_shell()
        await shell.run("true", 10)
        await sandbox.write_file("a", b"a")
        assert await sandbox.read_file("a") == b"a"
        running = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.005)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        with pytest.raises(SandboxError):
            await provider.start(f"life{n}", SandboxSpec())
        if n % 10 == 0:
            kernel = await sandbox.open_kernel()
            await kernel.run("1", 10)
            await kernel.close()
        if n % 3:
            await shell.close()
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"], timeout_s=10)
        await shell.close()

    async def lives() -> None:
        await life(0)
        before = descriptors()
        for first in range(1, repeats(25, 200), 4):
            await asyncio.gather(*(life(n) for n in range(first, first + 4)))
        assert descriptors() == before

    asyncio.run(lives())
    assert list(sandbox_config().sandboxes_folder.iterdir()) == []
