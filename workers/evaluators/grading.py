"""The farm's side of the grader process: starts it when first needed, asks it, kills it when it hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from farm.errors import EvaluatorError
from farm.settings import settings
from workers.evaluators import grader

_START_S = 60.0
_LINE_BYTES = 1 << 24


class VerifierFailed(Exception):
    """The verifier raised, ran out of time or died on this answer."""


class Grader:
    """One grader process of one event loop; askers take turns. A process that failed is replaced at the next call."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, family: str, entry: dict[str, Any], answer: str, timeout_s: float) -> float:
        """What the verifier gives. Raises VerifierFailed, and EvaluatorError if no process can be started.

        The clock starts when it is this call's turn.
        """
        line = json.dumps({"family": family, "entry": entry, "answer": answer}) + "\n"
        async with self._turn:
            reply = await self._exchange(line.encode(), timeout_s)
        if "error" in reply:
            raise VerifierFailed(str(reply["error"]))
        return float(reply["score"])

    async def aclose(self) -> None:
        """End the process. Harmless when repeated."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await process.wait()

    async def _exchange(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        process = await self._running()
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await _ask(process, line)
            answered = True
            return reply
        except TimeoutError:
            raise VerifierFailed(f"no score after {timeout_s:.0f} s") from None
        except (OSError, ValueError):
            raise VerifierFailed("the grader process died") from None
        finally:
            # Also when cancelled: its answer would be taken for the next one's.
            if not answered:
                await self.aclose()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await self._start()
        return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *grader.command(settings().sandbox_user),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=grader.environment(),
            cwd="/",
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        ready = False
        try:
            async with asyncio.timeout(_START_S):
                assert process.stdout is not None
                ready = bool(await process.stdout.readline())
        except TimeoutError:
            pass
        finally:
            if not ready:
                _kill(process)
                await process.wait()
        if not ready:
            command = " ".join(grader.command(settings().sandbox_user))
            raise EvaluatorError(f"the grader process does not start; try it by hand: {command}")
        return process


async def _ask(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    await process.stdin.drain()
    reply: dict[str, Any] = json.loads(await process.stdout.readline())
    return reply


def _kill(process: asyncio.subprocess.Process) -> None:
    # It may have ended already without the loop knowing.
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


_graders: WeakKeyDictionary[asyncio.AbstractEventLoop, Grader] = WeakKeyDictionary()


def shared_grader() -> Grader:
    """The grader of this event loop."""
    return _graders.setdefault(asyncio.get_running_loop(), Grader())
