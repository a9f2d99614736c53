"""From a SandboxSpec to a running sandbox: image, layers, environment and tools first, then warm pool or start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from farm.settings import settings
from workers.sandboxes import cgroups
from workers.sandboxes.images.archives import layer
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.environments import agent_environment, environment
from workers.sandboxes.images.image import image
from workers.sandboxes.images.image_cache import held
from workers.sandboxes.images.runtime import exposure
from workers.sandboxes.kernel.python_runtime import kernel_folder
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.lifecycle.start import SOCKETS, MonitorBounds, MonitorPlan, launch, make_folder
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.lifecycle.user_ids import own_id
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.resource_exhaustion import scarcity
from workers.sandboxes.sandbox import ENVIRONMENT, SEARCH_PATH, NodeSandbox
from workers.sandboxes.sandbox_user import sandbox_user


@dataclass(frozen=True, slots=True)
class SandboxParts:
    """Everything a sandbox is made of, at hand on this node."""

    lower: tuple[str, ...]
    """Layers, the uppermost first."""
    binds: tuple[tuple[str, str], ...]
    bin_folders: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment variables that the image sets for its programs."""


Runtime = Callable[[Path, dict[str, str], SandboxSpec], tuple[list[str], dict[str, str]]]
"""From the sandbox's folder, its binds and its spec: a command that makes it, and its environment."""


def prepare(spec: SandboxSpec) -> SandboxParts:
    """Find or make all parts. Raises SandboxError. Blocks; quick once they are cached."""
    base = image(spec.image, spec.image_values)
    python = environment(spec.packages, base, alone=spec.without_dependencies)
    agent = agent_environment(spec.agent_packages, base)
    archives = [str(layer(archive)) for archive in reversed(spec.archives)]
    # where interpreters that are forked outside find it too, once they are inside
    kernels = str(kernel_folder())
    network = _network(base.system) if spec.network else ()
    # the two environments have one interpreter, and may be one
    binds = dict.fromkeys((*base.binds, *python.binds, *agent.binds, (kernels, kernels), *network))
    return SandboxParts((*archives, str(base.folder)), tuple(binds), python.bin_folders, base.variables)


def _network(system: bool) -> Iterator[tuple[str, str]]:
    """Yield the files that programs need to find and trust other machines."""
    yield os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"
    if system and Path("/etc/ssl/certs").is_dir():
        yield "/etc/ssl/certs", "/etc/ssl/certs"


class StartCounter:
    """The number of sandboxes that this process is starting for callers that wait."""

    def __init__(self) -> None:
        self.n = 0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.n += 1
        try:
            yield
        finally:
            with self._lock:
                self.n -= 1


STARTS = StartCounter()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The plan for sandboxes of one kind and spec; on a layer, if any, that was prepared before."""

    kind: str
    spec: SandboxSpec
    runtime: Runtime | None
    layer: str = ""

    def __post_init__(self) -> None:
        if not self.spec.workdir.startswith("/"):
            raise SandboxError(f"a sandbox's workdir {self.spec.workdir!r} must be an absolute path")

    def key(self, parts: SandboxParts) -> str:
        """The same for sandboxes that may stand in for each other: all that a command is given later is left out."""
        result = (self.spec.workdir, self.spec.network, self._bounds())
        return digest(self.kind, parts.lower, parts.binds, self.layer, *result)

    def start(self, sandbox_id: str, parts: SandboxParts | None = None) -> NodeSandbox:
        """Start one, or take one from the warm pool. Blocks. Raises SandboxError, and then leaves nothing."""
        state = folder(sandbox_id)
        parts = parts or prepare(self.spec)
        key = self.key(parts)
        record = warm_pool.take(key, state) if settings().stock else None
        if record is None:
            with STARTS.counted():
                record = self._make(state, parts)
        if settings().stock and not self.layer:
            warm_pool.note_use(warm_pool.WarmPoolUse(key, self.kind, self.spec))
        return NodeSandbox(record, self.spec, parts.bin_folders, parts.variables)

    def fill_warm_pool(self, parts: SandboxParts) -> Path:
        """Put one more into the warm pool; returns its folder there. Raises SandboxError. Blocks."""
        return warm_pool.put(self._make(warm_pool.starting(self.key(parts)), parts))

    def _make(self, state: Path, parts: SandboxParts) -> SandboxRecord:
        if not self.layer:
            return self._start(state, parts)
        with layers.held(self.layer) as files:
            if files is None:
                raise SandboxError(f"sandbox {state.name}: the layer {self.layer} that was prepared for it is gone")
            return self._start(state, replace(parts, lower=(str(files), *parts.lower)))

    def _start(self, state: Path, parts: SandboxParts) -> SandboxRecord:
        exposed, closed = exposure() if self.runtime else ("", "")
        sources = [*parts.lower, *(source for source, _ in parts.binds), *([exposed] if exposed else [])]
        with scarcity(f"start sandbox {state.name}"):
            return self._launch(state, parts, sources, (exposed, closed))

    def _launch(
        self, state: Path, parts: SandboxParts, sources: Sequence[str], exposure: tuple[str, str]
    ) -> SandboxRecord:
        lock = make_folder(state, [Path(source).is_dir() for source in sources])
        try:
            if self.layer:
                layers.mark(state, self.layer)
            with held(Path(parts.lower[-1])) as image_lock, own_id([str(state), *parts.lower]) as (number, locks):
                locks += [] if image_lock is None else [image_lock]
                return launch(self._plan(state, parts, number, *exposure), lock, locks)
        except BaseException:
            cgroups.remove(cgroups.of(state))
            remove(state)
            raise
        finally:
            os.close(lock)

    def _plan(self, state: Path, parts: SandboxParts, number: int, exposed: str, closed: str) -> MonitorPlan:
        staged = {
            str(state / "stage" / str(number)): target
            for number, (_, target) in enumerate(parts.binds, start=len(parts.lower))
        }
        command, command_env = self.runtime(state, staged, self.spec) if self.runtime else ([], {})
        return {
            "sandbox_id": state.name,
            "kind": self.kind,
            "state": str(state),
            "user": sandbox_user(),
            "own_id": number,
            "lower": list(parts.lower),
            "binds": list(parts.binds),
            "are_folders": [Path(source).is_dir() for source, _ in parts.binds],
            "workdir": self.spec.workdir,
            "env": {**ENVIRONMENT, "PATH": SEARCH_PATH},
            "exposed": exposed,
            "closed": closed,
            "runtime": command,
            "runtime_env": command_env,
            "network": self.spec.network,
            "sockets": SOCKETS,
            "limits": self._bounds(),
            "cgroup": cgroups.make(state, self.spec.limits.memory_mb, self.spec.limits.n_processes),
        }

    def _bounds(self) -> MonitorBounds:
        limits = self.spec.limits
        return {"memory_mb": limits.memory_mb, "n_processes": limits.n_processes, "disk_mb": limits.disk_mb}


def attach(kind: str, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
    """A handle on a sandbox that runs on this node. Raises SandboxError if there is none. Blocks briefly."""
    record = SandboxRecord.load(folder(sandbox_id))
    if record is None or record.kind != kind or not record.first.alive():
        raise SandboxError(f"sandbox {sandbox_id}: no {kind} sandbox of this id runs on this node")
    parts = prepare(spec)
    return NodeSandbox(record, spec, parts.bin_folders, parts.variables)
