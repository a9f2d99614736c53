"""The client of the grader process: starts it on first use, sends requests, restarts it when it hangs or has crashed.

The grader never evaluates text of a policy, so its own end is always a fault of the farm: an EvaluatorError for all
requests in progress. A scorer's end comes with its reply, for the rule of `process_end.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from farm.errors import EvaluatorError
from workers.config import own_config
from workers.evaluators import grader
from workers.evaluators.node_conditions import Conditions, observed
from workers.evaluators.process_end import ProcessEnd

_START_S = 300.0
"""Importing takes a few seconds of CPU, and more if the confined user cannot read the modules."""
_GRACE_PERIOD_S = 10.0
"""Seconds after a scorer's limit without a reply after which the grader counts as hung."""
_LINE_BYTES = 1 << 24
_MOST_TRUSTED = 50_000

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
"""The settings of a dataset that uses its family's defaults."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A scorer's reply: a score, or an error of the verifier or a refusal in words; or nothing. `end` is its end."""

    end: ProcessEnd
    score: float | None = None
    error: str = ""
    refused: str = ""

    @property
    def replied(self) -> bool:
        return self.score is not None or bool(self.error) or bool(self.refused)


def graded(family: str, reply: dict[str, Any], limit_s: float, conditions: Conditions) -> Graded:
    """Read the grader's reply. Raises EvaluatorError if the scorer could not import a part of its library."""
    answer = reply["reply"] or {}
    if "broken" in answer:
        user = own_config().sandboxes.user
        raise EvaluatorError(
            f"the verifier of {family} {answer['broken']}: make the folders of its modules readable by {user}"
        )
    end = ProcessEnd(**{"limit_s": limit_s, **reply["end"]}, confined=True, conditions=conditions)
    return Graded(end, **answer)


class Grader:
    """One grader process of one event loop and one library, with at most one concurrent scorer per CPU."""

    def __init__(self, library: str = "reasoning-gym") -> None:
        self._library = library
        self._command = grader.command(own_config().sandboxes.user, library)
        self._room = asyncio.Semaphore(os.cpu_count() or 1)
        self._starting = asyncio.Lock()
        self._line: _Line | None = None
        self.trusted: set[str] = set()
        """Digests of the problems whose reference answers the current process has scored 1."""

    def trust(self, problem: str) -> None:
        """Record that a problem's reference answer scored 1."""
        if len(self.trusted) >= _MOST_TRUSTED:
            self.trusted.clear()
        self.trusted.add(problem)

    async def score(
        self,
        family: str,
        entry: dict[str, Any],
        answer: str,
        limit_s: float,
        settings: Mapping[str, Any] = NO_SETTINGS,
    ) -> Graded:
        """Score an answer by the verifier of a family, within `limit_s` of wall time from the start of its scorer.

        A scorer that waits long for a CPU gets the limit up to twice more. `settings` are the entry's dataset settings.
        Raises EvaluatorError if the grader cannot be started, has crashed, or hangs.
        """
        request = {"family": family, "entry": entry, "answer": answer, "limit_s": limit_s}
        request["settings"] = dict(settings)
        async with self._room, observed() as conditions:
            line = await self._connected()
            try:
                async with asyncio.timeout(limit_s + _GRACE_PERIOD_S) as limit:
                    reply = await line.ask(request, limit)
            except TimeoutError:
                line.kill()
                raise EvaluatorError(
                    f"the grader process hangs: no reply {_GRACE_PERIOD_S:.0f} s after the limit"
                ) from None
            except OSError:
                line.kill()
                raise EvaluatorError("the grader process died; the next answer starts a new one") from None
        return graded(family, reply, limit_s, conditions)

    @property
    def pid(self) -> int | None:
        """The id of the process, None before its start."""
        return self._line.pid if self._line else None

    async def aclose(self) -> None:
        """End the process. Idempotent."""
        line, self._line = self._line, None
        if line is not None:
            line.kill()
            await line.ended

    async def _connected(self) -> _Line:
        async with self._starting:
            if self._line is None or self._line.ended.done():
                await self.aclose()
                self.trusted.clear()
                self._line = _Line(await _started(self._command))
            return self._line


class _Line:
    """The pipes to one grader process; replies are matched to requests by number."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self._waiting: dict[int, tuple[asyncio.Future[Any], asyncio.Timeout]] = {}
        self._n_requests = 0
        self.ended = asyncio.ensure_future(self._read())

    async def ask(self, request: dict[str, Any], limit: asyncio.Timeout) -> dict[str, Any]:
        """Send a request and return the reply; the grader may extend `limit`. Raises OSError if the process ended."""
        assert self._process.stdin
        if self.ended.done():
            raise BrokenPipeError
        self._n_requests += 1
        number = self._n_requests
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply, limit
        try:
            self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            await self._process.stdin.drain()
            message: dict[str, Any] = await reply
            return message
        finally:
            del self._waiting[number]

    def kill(self) -> None:
        _kill(self._process)

    async def _read(self) -> None:
        assert self._process.stdout
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                # Cancelled requests are removed.
                reply, limit = self._waiting.get(message["id"], (None, None))
                if reply is None or limit is None or reply.done():
                    continue
                if "extended_s" in message:
                    limit.reschedule(asyncio.get_running_loop().time() + message["extended_s"] + _GRACE_PERIOD_S)
                else:
                    reply.set_result(message)
        except ValueError:
            pass
        finally:
            _kill(self._process)
            await self._process.wait()
            for reply, _ in self._waiting.values():
                if not reply.done():
                    reply.set_exception(BrokenPipeError())


async def _started(command: Sequence[str]) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=grader.environment(),
        cwd="/",
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    is_ready = False
    failure = ""
    try:
        async with asyncio.timeout(_START_S):
            assert process.stdout is not None
            if line := await process.stdout.readline():
                failure = json.loads(line)["failure"]
                is_ready = not failure
    except TimeoutError:
        pass
    finally:
        if not is_ready:
            _kill(process)
            await process.wait()
    if failure:
        raise EvaluatorError(f"the grader process scores known answers wrongly: {failure}")
    if not is_ready:
        raise EvaluatorError(f"the grader process does not start; try it manually: {' '.join(command)}")
    return process


def _kill(process: asyncio.subprocess.Process) -> None:
    # It may have ended already, unnoticed by the loop.
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


_graders: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Grader]] = WeakKeyDictionary()


def shared_grader(library: str = "reasoning-gym") -> Grader:
    """Return the grader of a library in this event loop."""
    graders = _graders.setdefault(asyncio.get_running_loop(), {})
    return graders.setdefault(library, Grader(library))
