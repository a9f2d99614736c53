"""A persistent interpreter for a model: after any cell the next one works, and lost state is reported.

There are two back ends with the same interface: IPython, controlled directly, and any Jupyter kernel of the sandbox,
through a client inside. Both are a process with a socket for cells and a pipe for output. There is no port, and no path
that the sandbox could replace.
"""

from __future__ import annotations

import asyncio
import contextlib

from workers.plugins.interfaces import Artefact, CellResult
from workers.sandboxes.kernel.cell_protocol import MEDIA_TYPES
from workers.sandboxes.kernel.interpreter import Interpreter, PeerGone, Program, Reply
from workers.sandboxes.kernel.jupyter_bridge import NAME
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import SandboxEntry

INTERRUPTS_S = (1.0, 1.0)
"""Time to wait for a cell's end after each SIGINT."""

_IPYTHON = Program("ipython_server")
_JUPYTER = Program("jupyter_bridge", on_farm_python=True)


async def open_kernel(entry: SandboxEntry, name: str = "") -> CellKernel:
    """Start IPython or the Jupyter kernel `name`. Raises SandboxError if there is no such kernel or no sandbox."""
    kernel = CellKernel(entry, name)
    await kernel.restart()
    return kernel


class CellKernel:
    """See `workers.plugins.interfaces.Kernel`. One cell at a time."""

    def __init__(self, entry: SandboxEntry, name: str) -> None:
        self._entry = entry
        self._program = _JUPYTER if name else _IPYTHON
        self._mark = new_tag()
        self._env = entry.environment({MARK: self._mark, **({NAME: name} if name else {})})
        self._interpreter: Interpreter | None = None
        self._n_images = 0

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """See `workers.plugins.interfaces.Kernel.run`. Raises SandboxError if the sandbox is gone."""
        notices = self._entry.notices()
        restarted = self._interpreter is None
        if self._interpreter is None:
            await self.restart()
        interpreter = self._interpreter
        assert interpreter
        # if this is cancelled, the next cell finds no interpreter and starts one
        self._interpreter = None
        try:
            reply, timed_out = await _run(interpreter, code, timeout_s)
            if reply is None:
                # first, because these processes may be printing
                await self._kill(interpreter)
            output, n_dropped, full = interpreter.output.take()
            if reply is not None:
                self._interpreter = interpreter
        finally:
            if self._interpreter is None:
                await self._drop(interpreter)
        if reply is None:
            await self.restart()
            reply, restarted = Reply("" if timed_out else "Died", ()), True
        images = self._named(reply.images)
        return CellResult(output, reply.error, timed_out, restarted, n_dropped, images, notices.take(), full)

    def _named(self, images: tuple[tuple[str, bytes], ...]) -> tuple[Artefact, ...]:
        first = self._n_images + 1
        self._n_images += len(images)
        return tuple(
            Artefact(f"image-{number}.{MEDIA_TYPES[media_type]}", media_type, data)
            for number, (media_type, data) in enumerate(images, first)
        )

    async def restart(self) -> None:
        """See `workers.plugins.interfaces.Kernel.restart`. Raises SandboxError if the sandbox is gone."""
        await self.close()
        self._interpreter = await Interpreter.started(self._entry, self._program, self._env)

    async def close(self) -> None:
        """End it and its descendants. Harmless when repeated."""
        if self._interpreter is not None:
            interpreter, self._interpreter = self._interpreter, None
            await self._drop(interpreter)

    async def _drop(self, interpreter: Interpreter) -> None:
        try:
            await self._kill(interpreter)
        finally:
            interpreter.close()

    async def _kill(self, interpreter: Interpreter) -> None:
        interpreter.kill()
        await asyncio.to_thread(kill_tagged, self._mark)


async def _run(interpreter: Interpreter, code: str, timeout_s: float) -> tuple[Reply | None, bool]:
    """Return the cell's result and whether it timed out. The result is None if the interpreter ended or hangs."""
    timed_out = False
    with contextlib.suppress(PeerGone):
        interpreter.begin(code)
        reply = await interpreter.ended(timeout_s)
        timed_out = reply is None
        for patience_s in INTERRUPTS_S if timed_out else ():
            interpreter.interrupt()
            if reply := await interpreter.ended(patience_s):
                break
        return reply, timed_out
    return None, timed_out
