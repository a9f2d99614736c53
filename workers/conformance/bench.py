"""All promises, the basic properties of a sandbox first; and the bench that tries them one by one.

It has one provider and a shared sandbox, and cleans up after each promise.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from farm.errors import FarmError, NotFound
from farm.records.request import SandboxSpec
from workers.conformance import outside
from workers.conformance.promises import (
    commands,
    crowds,
    files,
    isolation,
    kernels,
    lifetime,
    limits,
    networks,
    privileges,
    root_file_system,
    shells,
    transfer,
    tricks,
)
from workers.conformance.trial import GREETING, NotTried, Promise, PromiseTrial, short, within
from workers.plugins.interfaces import Sandbox, SandboxProvider

SURFACE = "surface"
"""The name of the group with promises of other groups that a fake sandbox keeps, too."""

_MODULES = (
    *(commands, files, transfer, shells, kernels),
    *(isolation, networks, privileges, tricks, root_file_system),
    *(limits, lifetime, crowds),
)
PROMISES: tuple[Promise, ...] = tuple(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Promise)
)

_ALIVE_S = 10.0
_CLEARED_S = 60.0
# the pid and start time of a process together are never reused
_LOOK_AROUND = """
read -r path; read -r pid; [[ -e $path ]] && echo file
{ read -r line < /proc/$pid/stat; } 2>/dev/null && line=${line##*) } && set -- $line && echo ${20}; true
"""


def groups() -> tuple[str, ...]:
    """Return the names of all groups."""
    return (*dict.fromkeys(promise.group for promise in PROMISES), SURFACE)


def chosen(group: Collection[str] = (), only: Collection[str] = ()) -> tuple[Promise, ...]:
    """Return the promises of some groups or with a name that matches a pattern; all if neither is given.

    Raises NotFound if a group or a pattern matches none.
    """
    for name in group:
        if name not in groups():
            raise NotFound(f"no group of promises is called {name!r}; there are: {', '.join(groups())}")
    for pattern in only:
        if not any(fnmatchcase(promise.name, pattern) for promise in PROMISES):
            raise NotFound(f"no promise is called {pattern!r}; --list shows them")
    return tuple(promise for promise in PROMISES if not (group or only) or _is_meant(promise, group, only))


def _is_meant(promise: Promise, group: Collection[str], only: Collection[str]) -> bool:
    in_group = promise.group in group or (promise.surface and SURFACE in group)
    return in_group or any(fnmatchcase(promise.name, pattern) for pattern in only)


class PromiseState(StrEnum):
    """The state of a promise after it was tried."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class PromiseResult:
    """The result of trying a promise; `reason` tells why it is not kept."""

    promise: Promise
    state: PromiseState
    reason: str = ""
    seconds: float = 0.0


class PromiseBench:
    """Use with `contextlib.aclosing`, which stops the shared sandbox. Sandboxes of a promise are stopped at its end.

    `fields` are those of a SandboxSpec for all sandboxes, such as `image`.
    """

    def __init__(self, provider: SandboxProvider, **fields: Any) -> None:
        self.provider = provider
        self._fields = fields
        self._shared: Sandbox | None = None
        self._programs: dict[str, bool] = {}
        self._apart = False

    async def judge(self, promise: Promise) -> PromiseResult:
        """Try a promise. All errors are part of the result."""
        began = time.monotonic()
        state, reason = PromiseState.KEPT, ""
        try:
            await self.hold(promise)
        except NotTried as why:
            state, reason = PromiseState.NOT_TRIED, str(why)
        except AssertionError as broken:
            state, reason = PromiseState.BROKEN, str(broken)
        except Exception as error:
            state, reason = PromiseState.BROKEN, f"{type(error).__name__}: {short(str(error))}"
        return PromiseResult(promise, state, reason, time.monotonic() - began)

    async def hold(self, promise: Promise) -> None:
        """Try a promise. Raises AssertionError if it is broken, and NotTried."""
        sandbox = await self.shared()
        await self._check_programs(sandbox, promise.needs)
        with _open_folder() as folder:
            if not promise.surface:
                await self._check_apart(sandbox, folder)
            trial = PromiseTrial(self.provider, sandbox, folder, self._fields)
            try:
                async with within(promise.time_s):
                    await promise.check(trial)
            except Exception:
                await self._close_if_dead()
                raise
            finally:
                async with within(_CLEARED_S):
                    await trial.close()

    async def shared(self) -> Sandbox:
        """Return the sandbox that promises share, starting it if necessary. Raises SandboxError."""
        if self._shared is None:
            spec = SandboxSpec(**{**self._fields, "env": GREETING})
            self._shared = await self.provider.start(f"promises-{secrets.token_hex(6)}", spec)
        return self._shared

    async def _check_apart(self, sandbox: Sandbox, folder: Path) -> None:
        """Check that commands cannot harm the node, before trying promises that could."""
        if not self._apart:
            canary = f"{folder}/canary\n{os.getpid()}\n".encode()
            (folder / "canary").touch()
            seen = (await sandbox.exec(["bash", "-c", _LOOK_AROUND], timeout_s=_ALIVE_S, stdin=canary)).stdout.split()
            (folder / "canary").unlink()
            for what, name in ((b"file", "files"), (outside.own_start(), "processes")):
                assert what not in seen, f"it was not tried: commands see {name} of the node, which it could harm"
            self._apart = True

    async def _check_programs(self, sandbox: Sandbox, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._programs:
                exec_result = await sandbox.exec(["bash", "-c", 'command -v "$0"', name], timeout_s=_ALIVE_S)
                self._programs[name] = exec_result.code == 0
            if not self._programs[name]:
                raise NotTried(f"the image has no {name}")

    async def _close_if_dead(self) -> None:
        """Replace the shared sandbox if it is dead, because a broken promise must not break the next."""
        alive = False
        if self._shared is not None:
            with contextlib.suppress(FarmError):
                alive = (await self._shared.exec(["true"], timeout_s=_ALIVE_S)).code == 0
        if not alive:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop the shared sandbox; the next promise starts another."""
        if self._shared is not None:
            sandbox, self._shared = self._shared, None
            await sandbox.stop()


@contextlib.contextmanager
def _open_folder() -> Iterator[Path]:
    """Yield a folder that all users of the node can read: protection from a sandbox must not depend on its mode."""
    with tempfile.TemporaryDirectory(prefix="promise-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
