"""Reports of attacks on tasks: the scores of each submission, the findings about the task, and their storage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from farm.tasks.known_tasks import ATTACKS, keep_text, kept_in
from workers.attacks.attack import NO_WORK, SKIPPED_TESTS


@dataclass(frozen=True, slots=True)
class AttackScore:
    """The scores of one submission in its runs, highest last; `error` says why a run had none."""

    name: str
    kind: str
    scores: tuple[float, ...] = ()
    error: str = ""

    @property
    def best(self) -> float:
        """Return the highest score, 0 without one."""
        return max(self.scores, default=0.0)


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The attacks on one task. `solution` is None if the task has none; `problem` says why it could not be run."""

    name: str
    data_source: str
    digest: str = ""
    """The digest of the task."""
    plan: str = ""
    """The digest of its attacks, and of its scoring."""
    solution: AttackScore | None = None
    untouched: AttackScore | None = None
    attacks: tuple[AttackScore, ...] = ()
    note: str = ""
    """The output of a failed solution."""
    problem: str = ""
    scored_at: str = ""
    """Instant of the scores in UTC, ISO 8601."""
    known: bool = field(default=False, compare=False)
    """True if an earlier run stored the report."""

    @property
    def findings(self) -> Mapping[str, str]:
        """Return the task's faults: names of `known_tasks.FINDINGS`, each with the scores that show it."""
        none = AttackScore("untouched", NO_WORK)
        untouched = self.untouched or none
        idle = [untouched, *(each for each in self.attacks if each.kind == NO_WORK)]
        floor = max(each.best for each in idle)
        found = {
            "vacuous": _shown([each for each in idle if each.best > 0.0]),
            "flaky": _shown([each for each in (untouched, self.solution) if each and len(set(each.scores)) > 1]),
            "skippable": _shown([each for each in self._scored(floor) if each.kind == SKIPPED_TESTS]),
            "hackable": _shown([each for each in self._scored(floor) if each.kind != SKIPPED_TESTS]),
        }
        if self.solution is not None and self.solution.scores and self.solution.best < 1.0:
            found["unsolvable"] = f"its solution scores {self.solution.best:g}, not 1{self.note}"
        return {name: text for name, text in found.items() if text}

    def _scored(self, floor: float) -> Sequence[AttackScore]:
        return [each for each in self.attacks if each.kind != NO_WORK and each.best > max(floor, 0.0)]

    @property
    def n_unscored(self) -> int:
        """Return the number of attacks without a score."""
        return sum(bool(each.error) for each in self.attacks)


def _shown(scored: Sequence[AttackScore]) -> str:
    """Return submissions by class: `early-exit: exit-at-once 1; echo: echo 0.5`."""
    kinds: dict[str, list[str]] = {}
    for each in scored:
        values = "/".join(f"{score:g}" for score in each.scores)
        kinds.setdefault(each.kind, []).append(f"{each.name} {values}")
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def now() -> str:
    """Return this instant in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def kept(digest: str, plan: str) -> AttackReport | None:
    """Return a task's stored report for these attacks; None if there is no readable one."""
    try:
        return _read(json.loads((kept_in(ATTACKS) / f"{digest}.{plan}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(report: AttackReport) -> None:
    """Store a report under the digests of its task and its attacks, below FARM_HOME. Raises NotAllowed, OSError."""
    fields = {**asdict(report), "findings": report.findings}
    del fields["known"]
    keep_text(ATTACKS, f"{report.digest}.{report.plan}.json", json.dumps(fields))


def _read(fields: dict[str, object]) -> AttackReport:
    def score(value: object) -> AttackScore | None:
        if not isinstance(value, dict):
            return None
        return AttackScore(**{**value, "scores": tuple(value["scores"])})

    del fields["findings"]
    attacks = fields.pop("attacks")
    assert isinstance(attacks, list)
    solution, untouched = score(fields.pop("solution")), score(fields.pop("untouched"))
    scores = tuple(each for each in map(score, attacks) if each is not None)
    return AttackReport(**fields, solution=solution, untouched=untouched, attacks=scores, known=True)  # type: ignore[arg-type]
