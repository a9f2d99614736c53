"""From a SandboxSpec to a running sandbox: prepare its parts, then start it or take one from the warm pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from farm.errors import SandboxError
from farm.ids import owned_sandbox_id
from farm.records.request import SandboxSpec
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.agent_programs.brought_programs import brought
from workers.sandboxes.build_sandbox import BuildSandbox, build_spec
from workers.sandboxes.images.archives import layer
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.image_config import ImageConfig
from workers.sandboxes.images.environments import agent_environment, environment
from workers.sandboxes.images.image import Image, image
from workers.sandboxes.images.image_cache import held
from workers.sandboxes.images.layered_image import image_user, is_bare
from workers.sandboxes.images.runtime import exposure
from workers.sandboxes.isolation.owners.file_owners import has_owners
from workers.sandboxes.kernel.python_runtime import kernel_folder
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.lifecycle.start import SOCKETS, MonitorBounds, MonitorPlan, launch, make_folder
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.lifecycle.user_ids import own_id
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.resource_exhaustion import scarcity
from workers.sandboxes.sandbox import ENVIRONMENT, SEARCH_PATH, NodeSandbox, ViewOfUsers
from workers.sandboxes.sandbox_user import sandbox_user


@dataclass(frozen=True, slots=True)
class SandboxParts:
    """All parts of a sandbox, available on this node."""

    lower: tuple[str, ...]
    """Layers, the uppermost first."""
    roots: tuple[Path, ...]
    """Cache folders, of images and others, that are locked while the sandbox runs."""
    binds: tuple[tuple[str, str], ...]
    bin_folders: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment variables that the image sets for its programs."""
    config: ImageConfig = field(default_factory=ImageConfig)
    """Other settings of the image's Dockerfile, such as WORKDIR and USER."""


WORKSPACE = "/workspace"
"""The working directory if neither the spec nor the image sets one."""

Runtime = Callable[[SandboxConfig, Path, dict[str, str], SandboxSpec], tuple[list[str], dict[str, str]]]
"""Function from a sandbox's folder, binds and spec to the command that creates it and the command's environment."""


def prepare(config: SandboxConfig, spec: SandboxSpec) -> SandboxParts:
    """Find or create all parts. Raises SandboxError. Blocks, but only briefly once the parts are cached."""
    start = partial(start_build, config)
    base = image(config, spec.image, spec.image_values, fallback=spec.fallback_image, start=start)
    python = environment(config, spec.packages, base, without_dependencies=spec.without_dependencies)
    agent = agent_environment(config, spec.agent_packages, base, spec.agent_python, always=bool(spec.agent_programs))
    programs = brought(config, spec.agent_programs, start)
    archives = [layer(config, archive) for archive in reversed(spec.archives)]
    # interpreters that are forked outside find it at the same path inside
    kernels = str(kernel_folder(config.cache))
    network = _network(base.system) if spec.network or spec.network_in else ()
    # the two environments share one interpreter, and can be identical
    binds = dict.fromkeys((*base.binds, *python.binds, *agent.binds, *programs.binds, (kernels, kernels), *network))
    lower = (*map(str, archives), *base.lower)
    roots = tuple(dict.fromkeys((*base.roots, *python.roots, *agent.roots, *programs.roots, *archives)))
    return SandboxParts(lower, roots, tuple(binds), python.bin_folders, base.variables, base.config)


def settled(spec: SandboxSpec, parts: SandboxParts) -> SandboxSpec:
    """Return the spec with the image's working directory if it has none; `/`, like Docker, if the image has none."""
    unnamed = "/" if spec.image_first else WORKSPACE
    return spec if spec.workdir else spec.model_copy(update={"workdir": parts.config.workdir or unnamed})


def start_build(config: SandboxConfig, base: Image) -> BuildSandbox:
    """Start a sandbox to build on an image. Raises SandboxError. Blocks."""
    spec, files = build_spec(config.build_network), config.build_files
    binds = (*base.binds, *(_network(base.system) if spec.network else ()), *((files[path], path) for path in files))
    parts = SandboxParts(base.lower, base.roots, binds, (), base.variables)
    bare = is_bare(base)
    plan = LaunchPlan(config, "namespace", spec, None, bare=bare)
    record = plan.launched(folder(config, owned_sandbox_id("build")), parts)
    users = ViewOfUsers("shown", (0, 0), base.lower)
    return BuildSandbox(NodeSandbox(config, record, spec, (), base.variables, users=users), bare=bare)


def _network(system: bool) -> Iterator[tuple[str, str]]:
    yield os.path.realpath("/etc/resolv.conf"), "/etc/resolv.conf"
    if system and Path("/etc/ssl/certs").is_dir():
        yield "/etc/ssl/certs", "/etc/ssl/certs"


class StartCounter:
    """The number of sandboxes that this process is currently starting for waiting callers."""

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
    """The plan for sandboxes of one kind and spec, optionally on a prepared layer."""

    config: SandboxConfig
    kind: str
    spec: SandboxSpec
    runtime: Runtime | None
    layer: str = ""
    bare: bool = False
    """True for a build on an image without programs."""

    def __post_init__(self) -> None:
        if self.spec.workdir and not self.spec.workdir.startswith("/"):
            raise SandboxError(f"a sandbox's workdir {self.spec.workdir!r} must be an absolute path")

    def _of(self, parts: SandboxParts) -> LaunchPlan:
        return self if self.spec.workdir else replace(self, spec=settled(self.spec, parts))

    def key(self, parts: SandboxParts) -> str:
        """Return the warm-pool key: sandboxes with equal keys are interchangeable. It omits per-command settings."""
        spec = self.spec
        workdir = settled(spec, parts).workdir
        return digest(self.kind, parts.lower, parts.binds, self.layer, workdir, spec.network, spec.cpus, self._bounds())

    def start(self, sandbox_id: str, parts: SandboxParts | None = None) -> NodeSandbox:
        """Start a sandbox or take one from the warm pool. Blocks. Raises SandboxError, leaving nothing behind."""
        state = folder(self.config, sandbox_id)
        parts = parts or prepare(self.config, self.spec)
        if self._of(parts) is not self:
            return self._of(parts).start(sandbox_id, parts)
        key = self.key(parts)
        record = warm_pool.take(self.config, key, state) if self.config.warm_pool else None
        if record is None:
            with STARTS.counted():
                record = self.launched(state, parts)
        if self.config.warm_pool and not self.layer:
            warm_pool.note_use(self.config, warm_pool.WarmPoolUse(key, self.kind, self.spec))
        return _sandbox(self.config, record, self.spec, parts, "init")

    def fill_warm_pool(self, parts: SandboxParts) -> Path:
        """Add a sandbox to the warm pool and return its folder. Raises SandboxError. Blocks."""
        return warm_pool.put(self._of(parts).launched(warm_pool.starting(self.config, self.key(parts)), parts))

    def launched(self, state: Path, parts: SandboxParts) -> SandboxRecord:
        """Start a sandbox in a folder without using the warm pool. Raises SandboxError. Blocks."""
        if not self.layer:
            return self._start(state, parts)
        with layers.held(self.config, self.layer) as files:
            if files is None:
                raise SandboxError(f"sandbox {state.name}: its prepared layer {self.layer} is gone")
            return self._start(state, replace(parts, lower=(str(files), *parts.lower)))

    def _start(self, state: Path, parts: SandboxParts) -> SandboxRecord:
        exposed, closed = exposure(self.config) if self.runtime else ("", "")
        sources = [*parts.lower, *(source for source, _ in parts.binds), *([exposed] if exposed else [])]
        with scarcity(f"start sandbox {state.name}"), ExitStack() as stack:
            lock = make_folder(self.config, state, [Path(source).is_dir() for source in sources])
            stack.callback(os.close, lock)
            try:
                if self.layer:
                    layers.mark(state, self.layer)
                held_images = [stack.enter_context(held(self.config, root)) for root in parts.roots]
                number, locks = stack.enter_context(own_id(self.config, [str(state), *parts.lower]))
                locks += [each for each in held_images if each is not None]
                return launch(self._plan(state, parts, number, exposed, closed), lock, self.config.lifeline_fd, locks)
            except BaseException:
                cgroups.remove(cgroups.of(state))
                remove(state)
                raise

    def _plan(self, state: Path, parts: SandboxParts, number: int, exposed: str, closed: str) -> MonitorPlan:
        staged = {
            str(state / "stage" / str(number)): target
            for number, (_, target) in enumerate(parts.binds, start=len(parts.lower))
        }
        command, command_env = self.runtime(self.config, state, staged, self.spec) if self.runtime else ([], {})
        limits = self.spec.limits
        return {
            "sandbox_id": state.name,
            "kind": self.kind,
            "state": str(state),
            "user": sandbox_user(self.config.user),
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
            "bare": self.bare,
            "limits": self._bounds(),
            "cgroup": cgroups.make(self.config, state, limits.memory_mb, limits.n_processes, self.spec.cpus),
        }

    def _bounds(self) -> MonitorBounds:
        limits = self.spec.limits
        return {"memory_mb": limits.memory_mb, "n_processes": limits.n_processes, "disk_mb": limits.disk_mb}


def attach(config: SandboxConfig, kind: str, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
    """Return a handle on a sandbox that runs on this node. Raises SandboxError if there is none. Blocks briefly."""
    record = SandboxRecord.load(folder(config, sandbox_id))
    if record is None or record.kind != kind or not record.first.alive():
        raise SandboxError(f"sandbox {sandbox_id}: no {kind} sandbox with this id runs on this node")
    return _sandbox(config, record, spec, prepare(config, spec), "run")


def _sandbox(
    config: SandboxConfig, record: SandboxRecord, spec: SandboxSpec, parts: SandboxParts, phase: str
) -> NodeSandbox:
    """Return a handle on a sandbox with the network access that its commands have in a phase of the rollout."""
    user = image_user(parts.lower, spec.user or parts.config.user)
    lower = (*layers.below(config, record.folder), *parts.lower)
    view: Literal["", "kept", "shown"] = "kept" if spec.fake_root is None and spec.image != "host" else ""
    if spec.fake_root or has_owners(lower):
        view = "shown"
    variables = {**parts.variables, **user.variables}
    bin_folders = parts.bin_folders
    if spec.image_first:
        variables["PATH"] = ":".join([variables.get("PATH", SEARCH_PATH), *bin_folders])
        bin_folders = ()
    own = settled(spec, parts)
    return NodeSandbox(
        config,
        record,
        own,
        bin_folders,
        variables,
        network=spec.network or phase in spec.network_in,
        users=ViewOfUsers(view, (user.uid, user.gid), lower, parts.config.user),
        image_config=parts.config,
    )
