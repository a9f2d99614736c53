"""Whole farms for tests: real processes in a separate folder, and the search for their leftovers."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from farm.embedded.child_process import ChildProcess
from farm.embedded.embedded_farm import FLOWER_USER, Embedded
from farm.home import known_key
from farm.settings import Settings, settings
from testkit.deadline import LONG_S, Deadline
from tests.services.apptainer import HOME
from tests.services.preloaded import program

T = TypeVar("T")
NOOP: dict[str, Any] = {"data_source": "noop", "fields": {}}
QUICK = {"FARM_LEASE_S": "6", "FARM_NODE_TIMEOUT_S": "6", "FARM_RETRY_S": "0.05", "FARM_RESEND_AFTER_S": "1"}
_PAUSE_S = (0.03, 0.5)
_ENDING_S = 5.0
_KERNELS = "FARM_TESTS_KERNELS"
_SHARED_CACHES = ("archives", "images", "kernels")
"""Not the environments: their scripts name the interpreter by the path of its installation."""


@contextmanager
def farm_folder() -> Iterator[Path]:
    """Yield a folder for a farm's home and scratch."""
    with _open_folder() as folder:
        _lend_kernels(folder / "home" / "cache")
        yield folder


@contextmanager
def _open_folder() -> Iterator[Path]:
    """Yield a new folder that sandboxes of another user can pass through."""
    folder = Path(tempfile.mkdtemp(prefix="farm-test-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lend_kernels(cache: Path) -> None:
    """Link a farm's kernel cache to a shared one: it is the same for all farms, and takes nine seconds to make."""
    shared = Path(os.environ.get(_KERNELS) or HOME / "cache" / "kernels").resolve()
    shared.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(shared)


@contextmanager
def home_of_tests() -> Iterator[None]:
    """Give this process of the tests its own FARM_HOME, with the caches of `HOME`.

    A test that makes its FARM_HOME private would close the caches to the user of root's sandboxes. If their path is
    already closed, the processes of one run share a kernel cache.
    """
    os.environ["FARM_TESTS_HOME"] = str(HOME)
    with ExitStack() as stack:
        home = stack.enter_context(_open_folder())
        (home / "cache").mkdir()
        for each in _SHARED_CACHES:
            (HOME / "cache" / each).mkdir(parents=True, exist_ok=True)
        for name in ("apptainer", *(f"cache/{each}" for each in _SHARED_CACHES)):
            (home / name).symlink_to(HOME / name)
        os.environ["FARM_HOME"] = str(home)
        if not os.geteuid() and not os.environ.get(_KERNELS) and not _may_be_passed(HOME / "cache"):
            os.environ[_KERNELS] = str(stack.enter_context(_open_folder()))
        settings.cache_clear()
        yield


def _may_be_passed(folder: Path) -> bool:
    return all(above.stat().st_mode & stat.S_IXOTH for above in (folder, *folder.parents))


class PreloadedFarm(Embedded):
    """A farm whose node and API are forked, which takes a tenth of the time of new programs."""

    def _start_node(self) -> ChildProcess:
        return program("workers.node", self._node_words(), self._env(), self.logs / "node.log")

    def _start_api(self, port: int) -> ChildProcess:
        return program("farm.cli.main", ["api", "--port", str(port)], self._env(), self.logs / "api.log")


def embedded(folder: Path, store_url: str = "", flower: bool = False, **env: str) -> Embedded:
    """Return a farm in a folder, not started yet, with short leases."""
    return embedded_of(16, folder, store_url, flower, **env)


def embedded_of(n_run: int, folder: Path, /, store_url: str = "", flower: bool = False, **env: str) -> Embedded:
    """Return the same, for so many concurrent rollouts."""
    settings = Settings(home=folder / "home", scratch=folder / "scratch", store_url=store_url, broker_url="")
    options = ("--init", "4", "--run", str(n_run), "--eval", "4")
    return PreloadedFarm(settings, node_options=options, flower=flower, env=QUICK | env)


@contextmanager
def node(
    folder: Path, name: str, store_url: str, broker_url: str, grace_s: float = 0, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a `farm node` as it is started under Slurm, with short leases. Its log is `<name>.log` in the folder.

    With an empty FARM_NODE it finds a name for itself.
    """
    env = os.environ | QUICK | {"FARM_NODE": name, "FARM_STORE_URL": store_url, "FARM_BROKER_URL": broker_url}
    env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch")}
    env |= more
    if not env["FARM_NODE"]:
        del env["FARM_NODE"]
    words = ["--init", "4", "--run", "8", "--eval", "4", "--grace", str(grace_s)]
    process = program("workers.node", words, env, folder / f"{name}.log").process
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(LONG_S)
        finally:
            # its workers and sandboxes end with it
            process.kill()
            process.wait()


def flower_request(url: str, home: Path) -> urllib.request.Request:
    """Return a request to a farm's Flower, as its owner makes it."""
    login = base64.b64encode(f"{FLOWER_USER}:{known_key(Settings(home=home))}".encode()).decode()
    return urllib.request.Request(url, headers={"authorization": f"Basic {login}"})


def until(found: Callable[[], T], what: str | Callable[[], str], deadline_s: float = 120.0) -> T:
    """Call until the result is true, and return it. `what` may be a function, called when the time is over.

    Calls take at most a thirtieth of the time, to leave the processors to the farm. The time is that of a quiet
    machine.
    """
    deadline = Deadline(deadline_s)
    while True:
        began = time.thread_time()
        if answer := found():
            return answer
        if deadline.passed():
            raise AssertionError(
                f"waited {deadline_s:g} s without success until {what if isinstance(what, str) else what()}"
            )
        time.sleep(min(max(_PAUSE_S[0], 29 * (time.thread_time() - began)), _PAUSE_S[1]))


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of the living processes of a folder's farm, sandboxes included."""
    mark = str(folder).encode()
    result = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            words = process.joinpath("cmdline").read_bytes()
            ours = mark in words or mark in process.joinpath("environ").read_bytes()
            zombie = process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if ours and not zombie:
            result.append(f"{process.name}: {words.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
    return result


def paths_below(folder: Path) -> list[Path]:
    """Return the files and folders below a folder. `rglob` fails on a folder that a running farm removes meanwhile."""
    return [Path(parent, name) for parent, folders, files in os.walk(folder) for name in folders + files]


def left_of(folder: Path) -> list[str]:
    """Return everything that a stopped farm should not have left: processes, mounts, sandboxes, sockets.

    A process that was killed, or sees the end of its parent, ends once a processor has served it.
    """
    deadline = Deadline(_ENDING_S)
    while processes_of(folder) and not deadline.passed():
        time.sleep(_PAUSE_S[0])
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    paths = paths_below(folder / "scratch")
    files = [str(path) for path in paths if path.parent.name == "sandboxes" or path.is_socket()]
    return processes_of(folder) + mounts + files
