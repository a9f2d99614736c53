"""Recovery times: from a fault to the same stage of a later attempt on another worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_GOOD = frozenset({"advanced", "completed"})


@dataclass(frozen=True, slots=True)
class Try:
    """One stage of one attempt, as stored; times are seconds since 1970."""

    rollout_id: str
    attempt: int
    stage: str
    worker: str
    started_at: float
    finished_at: float | None
    result: str | None


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault: its time, and its victims as in `Strike`."""

    kind: str
    at: float
    owners: tuple[str, ...]
    attempts: tuple[tuple[str, int], ...]


def recoveries(hits: Iterable[Hit], tries: Sequence[Try]) -> dict[str, list[float]]:
    """Return kind of fault → seconds until each affected rollout ran again, without rollouts that never did."""
    by_rollout: defaultdict[str, list[Try]] = defaultdict(list)
    for each in tries:
        by_rollout[each.rollout_id].append(each)
    result: defaultdict[str, list[float]] = defaultdict(list)
    for hit in hits:
        for lost in tries:
            if _is_hit(hit, lost) and (seconds := _until_again(hit.at, lost, by_rollout)) is not None:
                result[hit.kind].append(seconds)
    return dict(result)


def _is_hit(hit: Hit, lost: Try) -> bool:
    under_way = lost.started_at <= hit.at and (lost.finished_at is None or lost.finished_at >= hit.at)
    of_worker = any(lost.worker == name or (name.endswith("/") and lost.worker.startswith(name)) for name in hit.owners)
    named = of_worker or (lost.rollout_id, lost.attempt) in hit.attempts
    return named and under_way and lost.result not in _GOOD


def _until_again(at: float, lost: Try, by_rollout: Mapping[str, list[Try]]) -> float | None:
    later = [
        each.started_at
        for each in by_rollout[lost.rollout_id]
        if each.attempt > lost.attempt and each.stage == lost.stage and each.started_at > at
    ]
    return min(later) - at if later else None


def wasted(tries: Sequence[Try]) -> tuple[int, int]:
    """Return (wasted stages, all stages)."""
    return sum(each.result not in _GOOD for each in tries), len(tries)
