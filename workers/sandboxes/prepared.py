"""From a SandboxSpec to a running sandbox: image, layers, environment and tools first, then the start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farm.errors import SandboxError
from farm.request import SandboxSpec
from workers.sandboxes.archives import layer
from workers.sandboxes.closure import INSIDE, kernel_folder
from workers.sandboxes.environments import environment
from workers.sandboxes.images import image
from workers.sandboxes.joined import ENVIRONMENT, SEARCH_PATH, JoinedSandbox
from workers.sandboxes.owner import sandbox_user
from workers.sandboxes.record import Record, folder
from workers.sandboxes.remove import remove
from workers.sandboxes.runtime import exposure
from workers.sandboxes.start import launch, lifeline, make_folder


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything a sandbox is made of, at hand on this node."""

    lower: tuple[str, ...]
    """Layers, the uppermost first."""
    binds: tuple[tuple[str, str], ...]
    bin_folders: tuple[str, ...]


Runtime = Callable[[Path, dict[str, str], str], tuple[list[str], dict[str, str]]]
"""Given the sandbox's folder, its binds and its working folder: a command that makes a sandbox, and its environment."""


def prepare(spec: SandboxSpec) -> Prepared:
    """Find or make all parts. Raises SandboxError. Blocks; quick once they are cached."""
    base = image(spec.image)
    python = environment(spec.packages, base)
    layers = [str(layer(archive)) for archive in reversed(spec.archives)]
    binds = (*base.binds, *python.binds, (str(kernel_folder()), INSIDE))
    return Prepared((*layers, str(base.folder)), binds, python.bin_folders)


def start(kind: str, sandbox_id: str, spec: SandboxSpec, runtime: Runtime | None) -> JoinedSandbox:
    """Start a sandbox and wait until it is up. Raises SandboxError, and then leaves nothing. Blocks."""
    if not spec.workdir.startswith("/"):
        raise SandboxError(f"sandbox {sandbox_id}: workdir {spec.workdir!r} must be an absolute path")
    parts = prepare(spec)
    exposed, closed = exposure() if runtime else ("", "")
    sources = [*parts.lower, *(source for source, _ in parts.binds), *([exposed] if exposed else [])]
    state, lock = make_folder(sandbox_id, [Path(source).is_dir() for source in sources])
    try:
        staged = {
            str(state / "stage" / str(number)): target
            for number, (_, target) in enumerate(parts.binds, start=len(parts.lower))
        }
        command, command_env = runtime(state, staged, spec.workdir) if runtime else ([], {})
        record = launch(
            {
                "sandbox_id": sandbox_id,
                "kind": kind,
                "state": str(state),
                "user": sandbox_user(),
                "lower": list(parts.lower),
                "binds": list(parts.binds),
                "are_folders": [Path(source).is_dir() for source, _ in parts.binds],
                "workdir": spec.workdir,
                "env": {**ENVIRONMENT, "PATH": SEARCH_PATH},
                "exposed": exposed,
                "closed": closed,
                "runtime": command,
                "runtime_env": command_env,
                "lifeline_fd": lifeline(),
                "lock_fd": lock,
            }
        )
    except BaseException:
        remove(state)
        raise
    finally:
        os.close(lock)
    return JoinedSandbox(record, spec, parts.bin_folders)


def attach(kind: str, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
    """A handle on a sandbox that runs on this node. Raises SandboxError if there is none. Blocks briefly."""
    record = Record.load(folder(sandbox_id))
    if record is None or record.kind != kind or not record.first.alive():
        raise SandboxError(f"sandbox {sandbox_id}: no {kind} sandbox of this id runs on this node")
    return JoinedSandbox(record, spec, prepare(spec).bin_folders)
