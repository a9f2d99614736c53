"""Attributes the end of a process under scoring to its cause: the policy, or the farm.

Every evaluator applies this rule before it gives less than full marks, as a fault of the farm must never become a
score. The first match counts:

1. It passed: the score stands, whatever else failed.
2. A limit of the sandbox or of the scorer ended it (memory, disk, processes, CPU time): the policy.
3. The node was short of a resource (disk, inodes, memory, descriptors, threads). If it was before the submission ran,
   or still is after its sandbox is gone: the farm. Else unknown, as the submission may have used the resource up.
4. It ended by itself, with an exit code: the policy.
5. It timed out. If all its processes together used their CPU time (half of the limit if none is stated): the policy, as
   they can then only be waiting for each other. Else, if the machine was late (this event loop, or the process in the
   run queue) for a quarter of the limit: the farm. Else it slept or was frozen, which look alike: unknown; the farm if
   it never sleeps (`confined`).
6. A signal ended it. A signal that users and systems send (SIGKILL, SIGTERM, ...), if the process cannot send one
   itself (`confined`): the farm. Else it may have sent the signal itself: unknown. The kernel does not report the
   sender of a fatal signal.
7. Its sandbox is gone: unknown, as a policy may end the first process of its sandbox.

Repetition decides an unknown cause (`settle`): a control that must pass is run in a fresh environment, then the
submission a second time. If the control fails, or the node is short during it, the environment is the cause: the farm.
Two unknown ends with a passed control in between: the policy. The two ends need not be of one kind, as a submission
could end itself differently each time to avoid a score of 0. Repetitions after a shortage run one at a time, so that no
submission is blamed for what another one used up.

A fault of the farm is an EvaluatorError, so that the rollout is scored again; it is never a 0. This rule's decision
about a shortage is final: the stage does not check it again.

A broken scorer ends every submission like a wrong one. So if it names itself to `settle`, a score below full marks
stands only if the scorer gave full marks in this process within the last ten minutes, to a submission or to the
control; unless the run itself shows that the scorer works, such as by some passed tests.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from farm.errors import EvaluatorError
from workers.evaluators.node_conditions import Conditions, observed, shortage
from workers.plugins.interfaces import ExecResult
from workers.sandboxes.shortage import judging
from workers.stage_clock import off_clock

T = TypeVar("T")

_BUSY_SHARE = 0.5
_LATE_SHARE = 0.25
_MIN_LATE_S = 0.5
_PROVEN_S = 600.0
_TURN_S = 3600.0
"""Seconds that a repetition waits for others at most, without being charged to its stage's time."""
_START_S = 120.0
"""Seconds in addition to its trials in which their sandboxes start."""
_LOOKS_S = (0.1, 0.2, 0.4, 0.8, 1.5, 2.0)
"""Pauses, five seconds in all, in which the kernel frees a sandbox's resources."""
_SENT = frozenset(
    {
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_LIMITS: dict[int, str] = {
    signal.SIGXCPU: "its limit of CPU time was reached",
    signal.SIGXFSZ: "its limit of file size was reached",
}


def signal_of(code: int) -> int:
    """Return the signal that an exit code stands for, including a shell's encoding; 0 if none."""
    if code < 0:
        return -code
    return code - 128 if 128 < code <= 128 + signal.NSIG else 0


class EndCause(Enum):
    """The cause of an end: the policy, the farm, or unknown."""

    POLICY = "the policy's"
    FARM = "the farm's"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process, as seen from outside, and the measurements meanwhile.

    `code` is the exit code, negative for a signal, None if unknown; above 128 it is a shell's code for a signal of its
    child. `limit` names the farm's limit that ended it. `cpu_s` is the CPU time of it and all its descendants, None if
    not measured; `cpu_limit_s` the CPU time allowed within `limit_s`, None if not stated; `waited_s` the time for which
    it was runnable but got no CPU. `confined`: no program of the policy ran in it, so it sends no signals and never
    sleeps. `gone`: the reason why its sandbox is gone.
    """

    code: int | None
    timed_out: bool = False
    limit_s: float = 0.0
    limit: str = ""
    cpu_s: float | None = None
    cpu_limit_s: float | None = None
    waited_s: float = 0.0
    confined: bool = False
    gone: str = ""
    conditions: Conditions = field(default_factory=Conditions)

    @classmethod
    def of(cls, result: ExecResult, limit_s: float, conditions: Conditions) -> ProcessEnd:
        """Return the end of a command in a sandbox with the time limit `limit_s`."""
        return cls(result.code, result.timed_out, limit_s, result.limit, conditions=conditions)

    def within(self, conditions: Conditions) -> ProcessEnd:
        """Return the end with the shortage of the whole trial, of which it ended a part."""
        shortage, earlier = conditions.shortage, conditions.earlier
        return replace(self, conditions=replace(self.conditions, shortage=shortage, earlier=earlier))

    @property
    def signal(self) -> int:
        """The signal that ended it, 0 if none."""
        return signal_of(self.code or 0)

    @property
    def kind(self) -> str:
        """A description in words."""
        if self.gone:
            return "its sandbox is gone"
        if self.timed_out:
            return "it timed out"
        if self.signal:
            return f"signal {self.signal} ended it"
        return "it ended by itself" if self.code is not None else "its end is unknown"


def doing(end: ProcessEnd) -> tuple[EndCause, str]:
    """Return the cause of an end without a pass, and the reason in words; see the rule above."""
    conditions = end.conditions
    if limit := end.limit or _LIMITS.get(end.signal, ""):
        return EndCause.POLICY, limit
    if conditions.shortage:
        return EndCause.FARM if conditions.earlier else EndCause.UNKNOWN, conditions.shortage
    if end.gone:
        return EndCause.UNKNOWN, end.gone
    if end.timed_out:
        return _out_of_time(end)
    if end.confined and end.signal in _SENT:
        return EndCause.FARM, f"it got signal {end.signal} from outside, as it can send none"
    if end.signal or end.code is None:
        return EndCause.UNKNOWN, end.kind
    return EndCause.POLICY, f"it ended with exit code {end.code}"


def _out_of_time(end: ProcessEnd) -> tuple[EndCause, str]:
    enough_s = _BUSY_SHARE * end.limit_s if end.cpu_limit_s is None else end.cpu_limit_s
    if end.cpu_s is not None and end.cpu_s >= enough_s:
        return EndCause.POLICY, f"it computed for {end.cpu_s:.1f} s of {end.limit_s:.1f} s"
    late_s = max(end.conditions.late_s, end.waited_s)
    if late_s >= max(_MIN_LATE_S, _LATE_SHARE * end.limit_s):
        return EndCause.FARM, f"the machine was late by {late_s:.1f} s while its {end.limit_s:.1f} s passed"
    return EndCause.FARM if end.confined else EndCause.UNKNOWN, f"its {end.limit_s:.1f} s passed while it did nothing"


@dataclass(frozen=True, slots=True)
class Trial(Generic[T]):
    """One run of a submission: its score, and the end of its process. `passed`: full marks.

    `stands`: its score needs no proof of the scorer, as the run shows that it works, or left no time for a control.
    """

    value: T
    end: ProcessEnd
    passed: bool = False
    stands: bool = False


_REPETITION_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""One lock per event loop, held by the one submission that is repeated after a shortage."""
_proven: dict[str, float] = {}
"""Scorers by name, with the time of their last full marks, in that order; removed after ten minutes."""


async def settle(
    trial: Callable[[], Awaitable[Trial[T]]], control: Callable[[], Awaitable[str]], what: str, *, scorer: str = ""
) -> T:
    """Run a submission, repeatedly if necessary, until its score is attributed to the policy; see the rule above.

    `trial` runs it in a fresh environment each time. `control` runs something that must pass in such an environment,
    and returns how it failed; empty if it passed. `scorer` names the scorer of both, if the control is scored by it,
    plus the instance if the proof of one instance says nothing about others. Raises EvaluatorError, about `what`, if
    the farm caused the end, or if the scorer gives nothing full marks.
    """
    with judging():
        began = time.monotonic()
        run = await trial()
        is_proven = False
        cause, reason = await _judged(run)
        if cause is EndCause.UNKNOWN:
            took_s = max(time.monotonic() - began, run.end.limit_s)
            async with _repetition(took_s) if run.end.conditions.shortage else nullcontext():
                async with observed() as conditions:
                    failed = await control()
                if failed := failed or conditions.shortage:
                    raise EvaluatorError(f"{what}: {reason}, and a control that must pass also failed: {failed}")
                is_proven = True
                run = await trial()
                cause, reason = await _judged(run)
        if cause is EndCause.FARM:
            raise EvaluatorError(f"{what}: {reason}; it is scored again")
        known_s = time.monotonic() - _proven.get(scorer, -math.inf)
        if scorer and not (run.passed or run.stands or is_proven) and known_s > _PROVEN_S:
            if failed := await control():
                raise EvaluatorError(f"{what}: {reason}, and a control that must pass did not: {failed}")
            is_proven = True
        if scorer and (is_proven or run.passed):
            _note_proven(scorer)
        return run.value


def _note_proven(scorer: str) -> None:
    now = time.monotonic()
    _proven.pop(scorer, None)
    while _proven and now - next(iter(_proven.values())) > _PROVEN_S:
        del _proven[next(iter(_proven))]
    _proven[scorer] = now


@asynccontextmanager
async def _repetition(took_s: float) -> AsyncIterator[None]:
    """Let a control and a second trial, of `took_s` each, run off the stage's clock, one submission at a time."""
    lock = _REPETITION_LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    with off_clock(_TURN_S):
        await lock.acquire()
    try:
        with off_clock(2 * took_s + _START_S):
            yield
    finally:
        lock.release()


async def _judged(trial: Trial[T]) -> tuple[EndCause, str]:
    """Return the cause of the end of a trial, whose sandbox is gone by now, and the reason."""
    if trial.passed:
        return EndCause.POLICY, "it passed"
    cause, reason = doing(trial.end)
    if cause is EndCause.UNKNOWN and trial.end.conditions.shortage and (still := await _lasting_shortage()):
        return EndCause.FARM, still
    return cause, reason


async def _lasting_shortage() -> str:
    """Return the resource that the node is short of, if the shortage lasts."""
    for pause_s in _LOOKS_S:
        if not shortage():
            return ""
        await asyncio.sleep(pause_s)
    return shortage()
