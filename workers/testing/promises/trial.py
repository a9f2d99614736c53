"""One promise being tried: the sandboxes it may use, and what is cleared away when it ends."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

from farm.request import SandboxSpec
from workers.interfaces import ExecResult, Kernel, Sandbox, SandboxProvider, Shell
from workers.testing.promises import outside
from workers.testing.promises.expect import NotTried, short, told, until

GREETING = {"GREETING": "hello"}
"""What the environment of the shared sandbox has beside the usual."""


class Trial:
    """What a promise is given.

    `sandbox` is shared with other promises: do nothing to it that they would notice. `folder` is an empty folder of the
    node that all its users can read. `mark` is a number that occurs nowhere else: `sleep MARK` is found from outside.
    """

    def __init__(self, provider: SandboxProvider, sandbox: Sandbox, folder: Path, fields: dict[str, Any]) -> None:
        self.provider = provider
        self.sandbox = sandbox
        self.folder = folder
        self.mark = f"7{secrets.randbelow(10**9):09d}"
        self._fields = fields
        self._started: list[Sandbox] = []
        self._opened: list[Shell | Kernel] = []

    def spec(self, **fields: Any) -> SandboxSpec:
        """A spec of the image that is tried."""
        return SandboxSpec(**{**self._fields, **fields})

    def new_id(self) -> str:
        return f"promise-{self.mark}-{secrets.token_hex(3)}"

    async def start(self, **fields: Any) -> Sandbox:
        """A new sandbox, of a spec with these fields; stopped when the promise ends."""
        return await self.start_as(self.new_id(), **fields)

    async def start_as(self, sandbox_id: str, **fields: Any) -> Sandbox:
        """The same, with an id of one's own."""
        sandbox = await self.provider.start(sandbox_id, self.spec(**fields))
        self._started.append(sandbox)
        return sandbox

    async def shell(self, on: Sandbox | None = None) -> Shell:
        """A new shell, in the shared sandbox or another; closed when the promise ends."""
        shell = await (on or self.sandbox).open_shell()
        self._opened.append(shell)
        return shell

    async def kernel(self, on: Sandbox | None = None) -> Kernel:
        """A new kernel, in the shared sandbox or another; closed when the promise ends."""
        kernel = await (on or self.sandbox).open_kernel()
        self._opened.append(kernel)
        return kernel

    def sleepers(self) -> list[int]:
        """The processes of the node, inside sandboxes too, that are a `sleep MARK`."""
        return outside.processes_with(f"sleep\0{self.mark}")

    async def until_asleep(self, n: int = 1) -> None:
        """Wait until so many run. NotTried if the node does not see any, as with those of a virtual machine."""
        try:
            await until(lambda: len(self.sleepers()) >= n, f"{n} processes ran")
        except AssertionError:
            if self.sleepers():
                raise
            raise NotTried("the node does not see the processes of this kind of sandbox") from None

    async def close(self) -> None:
        """Close what was opened and stop what was started."""
        await asyncio.gather(*(opened.close() for opened in self._opened))
        await asyncio.gather(*(sandbox.stop() for sandbox in self._started))

    async def bash(self, script: str, on: Sandbox | None = None, timeout_s: float = 20.0, **more: Any) -> ExecResult:
        """How a script ends, in the shared sandbox or another."""
        return await (on or self.sandbox).exec(["bash", "-c", script], timeout_s=timeout_s, **more)

    async def sh(self, script: str, on: Sandbox | None = None, timeout_s: float = 20.0) -> str:
        """What a script prints, which must succeed and not complain."""
        return _clean(await self.bash(script, on, timeout_s), script)

    async def python(self, code: str, *arguments: str, on: Sandbox | None = None, timeout_s: float = 20.0) -> str:
        """What a Python program prints, which must succeed and not complain."""
        argv = ["python3", "-I", "-c", code, *arguments]
        return _clean(await (on or self.sandbox).exec(argv, timeout_s=timeout_s), code)


def _clean(result: ExecResult, script: str) -> str:
    clean = result.code == 0 and not result.stderr
    assert clean, f"`{short(script.strip())}` should succeed, and ended with {result.code}: {short(told(result))}"
    return result.stdout.decode(errors="replace")
