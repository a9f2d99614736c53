"""A running sandbox as its users see it: a first process whose namespaces are joined, for both kinds of sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import posixpath
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from farm.errors import SandboxError
from farm.records.request import SandboxLimits, SandboxSpec
from workers.config import SandboxConfig
from workers.plugins.interfaces import ExecResult, Kernel
from workers.sandboxes.images.dockerfile.image_config import ImageConfig
from workers.sandboxes.images.layered_image import OF_USERS, image_user
from workers.sandboxes.isolation.owners.file_owners import has_owners
from workers.sandboxes.kernel.kernel import open_kernel
from workers.sandboxes.lifecycle.start import SOCKETS
from workers.sandboxes.lifecycle.state import SandboxRecord, terminate
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import Collector, LimitEvents, SandboxProcess, check_words, memory_file
from workers.sandboxes.resource_exhaustion import scarcity
from workers.sandboxes.sandbox_user import sandbox_user
from workers.sandboxes.shell.shell import BashShell
from workers.sandboxes.shortage import DiskUse
from workers.sandboxes.transfer import Transfer

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget

MAX_OUTPUT = 10_000_000
"""Maximum size of each stream of a command that is kept, in bytes; the rest is read and dropped."""

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}


@dataclass(frozen=True, slots=True)
class ViewOfUsers:
    """The users of a sandbox and the owners of its files, as its programs see them.

    `view` is `JoinTarget.users`. Programs start as `user` and write over the layers `lower`. `named` is the user that
    the image declares; empty for root.
    """

    view: Literal["", "kept", "shown"]
    user: tuple[int, int]
    lower: tuple[str, ...]
    named: str = ""


class NodeSandbox(Transfer):
    """A sandbox of this node, started by any process. The fork server joins it for each command."""

    def __init__(
        self,
        config: SandboxConfig,
        record: SandboxRecord,
        spec: SandboxSpec,
        bin_folders: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        *,
        network: bool | None = None,
        users: ViewOfUsers | None = None,
        image_config: ImageConfig | None = None,
    ) -> None:
        super().__init__(record.sandbox_id, spec.workdir, spec.limits.disk_mb)
        self.config = config
        self.folder = record.folder
        self.socket_folder = record.folder / SOCKETS
        self.users = users or ViewOfUsers("", (0, 0), ())
        self.identity = self.users.user
        """The user and group as which programs are started from now on."""
        self._record = record
        self._image_config = image_config or ImageConfig()
        self._spec = spec
        self._network = spec.network if network is None else network
        self._cpus = chosen_cpus(record.sandbox_id, spec.cpus)
        own = dict(variables or {})
        self._variables = {**own, "PATH": ":".join([*bin_folders, own.get("PATH", SEARCH_PATH)])}

    def as_user(self, user: str) -> NodeSandbox:
        account = image_user(self.users.lower, user or self.users.named)
        sandbox = copy.copy(self)
        sandbox.identity = (account.uid, account.gid)
        # for root, `ENVIRONMENT` has them
        others = {name: value for name, value in self._variables.items() if name not in OF_USERS}
        sandbox._variables = {**others, **account.variables}
        return sandbox

    def image_config(self) -> ImageConfig:
        return self._image_config

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of every command. It contains nothing of the worker's environment."""
        return {**ENVIRONMENT, **self._variables, **self._spec.env, **(more or {})}

    def notices(self) -> LimitEvents:
        return LimitEvents(self.folder, self._record.cgroup)

    def target(self, limits: SandboxLimits | None = None) -> JoinTarget:
        view = self.users.view
        if view == "kept" and has_owners([str(self.folder / "upper")]):
            view = "shown"
        return {
            "pid": self._record.first.pid,
            "started": self._record.first.started,
            "user": sandbox_user(self.config.user),
            "network": self._network,
            "limits": _resources(self._spec.limits, limits or self._spec.limits),
            "cgroup": self._record.cgroup,
            "users": view,
            "identity": self.identity,
            "cpus": self._cpus,
        }

    def alive(self) -> bool:
        """Return whether its first process is alive; all other processes end with it."""
        return self._record.first.alive()

    def limits_reached(self) -> str:
        """Return the limits reached since the start of the sandbox, in words; call it while the sandbox exists."""
        return LimitEvents(self.folder, self._record.cgroup, from_start=True).take()

    def disk_use(self) -> DiskUse | None:
        """Return a measurement of its disk usage from now on; None if it is gone."""
        try:
            return DiskUse(self.folder, self._record.first.pid)
        except OSError:
            return None

    def _check_alive(self) -> None:
        if not self.alive():
            raise SandboxError(f"sandbox {self.sandbox_id} is gone: its first process has ended")

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        terminal: bool = False,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxProcess:
        check_words(argv, env, cwd)
        self._check_alive()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            descriptors = {0: null, 1: null, 2: null, **fds}
            job = {
                "do": "enter",
                "target": self.target(limits),
                "argv": list(argv),
                "env": dict(env),
                "cwd": posixpath.join(self._spec.workdir, cwd or ""),
                "terminal": terminal,
                "numbers": list(descriptors),
            }
            answers = fork_client().request(job, list(descriptors.values()))
        finally:
            os.close(null)
        return await SandboxProcess.started(answers, self.sandbox_id)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run one command to its end, or kill it and its descendants after `timeout_s`. See `Sandbox.exec`.

        A background command that outlives its parent continues; its later output is lost.
        """
        check_words(argv, env or {}, cwd)
        mark = new_tag()
        notices = self.notices()
        with contextlib.ExitStack() as resources:
            with scarcity(f"run a command in sandbox {self.sandbox_id}"):
                out = resources.enter_context(contextlib.closing(Collector(MAX_OUTPUT)))
                err = resources.enter_context(contextlib.closing(Collector(MAX_OUTPUT)))
                fds = {1: out.write_end, 2: err.write_end}
                if stdin:
                    fds[0] = resources.enter_context(memory_file(stdin))
                child = await self.start(
                    argv, env={**self.environment(env), MARK: mark}, fds=fds, cwd=cwd, limits=limits
                )
            resources.callback(child.close)
            out.close_write_end()
            err.close_write_end()
            try:
                code = await child.wait_within(timeout_s)
            except BaseException:
                kill_tagged(mark)
                raise
            if code is None:
                child.kill()
                await asyncio.to_thread(kill_tagged, mark)
            elif code != 0:
                self._check_alive()
            reached = notices.take(code)
            return ExecResult(code, out.finish(), err.finish(), timed_out=code is None, limit=reached)

    async def open_shell(self) -> BashShell:
        return await BashShell.open(self)

    async def open_kernel(self, name: str = "") -> Kernel:
        return await open_kernel(self, name)

    async def stop(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Stop the sandbox, like `stop`. Blocks."""
        terminate(self._record)


def chosen_cpus(sandbox_id: str, cpus: float | None) -> list[int]:
    """Return the CPUs that a sandbox may use, chosen by a hash of its id; empty if it may use all."""
    available = sorted(os.sched_getaffinity(0))
    n = len(available) if cpus is None else math.ceil(cpus)
    if n >= len(available):
        return []
    first = zlib.crc32(sandbox_id.encode()) % len(available)
    return sorted((available + available)[first : first + n])


def _resources(bounds: SandboxLimits, requested: SandboxLimits) -> dict[str, int]:
    mb = 1 << 20
    limits = {
        "RLIMIT_CORE": 0,
        # for the whole sandbox, because the kernel counts it for each user namespace
        "RLIMIT_NPROC": bounds.n_processes,
        "RLIMIT_CPU": min(bounds.cpu_s, requested.cpu_s),
        "RLIMIT_NOFILE": min(bounds.n_files, requested.n_files),
        "RLIMIT_FSIZE": min(bounds.file_mb, requested.file_mb) * mb,
    }
    # counts reserved memory even if it is unused, and a race detector reserves terabytes. So the sandbox's own limit is
    # left to its control group or the watcher. A command's limit has no other guard.
    if requested.memory_mb < bounds.memory_mb:
        limits["RLIMIT_DATA"] = requested.memory_mb * mb
    return limits
