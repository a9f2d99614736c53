"""Report of a run: figures with their targets, the faults by kind, the broken promises with their ids."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import select

from farm.records.rollout import State
from farm.store.rollouts import attempts, rollouts
from testkit.report import Report
from tests.chaos import checks
from tests.chaos.checks import BrokenPromise
from tests.chaos.recovery import Hit, Try, recoveries, wasted
from tests.chaos.run import Injected, Run

_LOST = frozenset({"conservation", "nothing is lost"})
_NOT_ENDED = frozenset({"every rollout ends", "every batch ends"})
_NOT_DELIVERED = frozenset({"every group is delivered", "every client is given its batches"})
_DOUBLED = frozenset(
    {"every rollout ends once", "a score for each scoring", "a batch is made once", "the same score each time"}
)
_WRONG = frozenset({"nothing broken is scored"})
_ROWS = {
    "results_lost": _LOST,
    "not_ended_in_time": _NOT_ENDED,
    "not_delivered_in_time": _NOT_DELIVERED,
    "results_doubled": _DOUBLED,
    "wrongly_scored": _WRONG,
}
_SHOWN = 40
_WRONG_S = 1800.0


@dataclass(frozen=True, slots=True)
class Findings:
    """The farm's data for the report, read while its store still existed."""

    n_rollouts: int
    n_ended: dict[str, int]
    given_up: dict[str, int]
    tries: list[Try]
    errors: dict[str, str]
    """The last error of each kind that ended an attempt."""


def findings(run: Run) -> Findings:
    names = ("rollout_id", "attempt", "stage", "worker", "started_at", "finished_at", "result")
    statement = select(*(attempts.c[name] for name in names))
    tries = run.parts.store.read(lambda connection: [Try(*row) for row in connection.execute(statement)])
    states = run.parts.store.read(
        lambda connection: Counter(connection.execute(select(rollouts.c.state)).scalars().all())
    )
    ended_by = select(attempts.c.result, attempts.c.error).where(attempts.c.error.is_not(None))
    errors = run.parts.store.read(lambda connection: dict(tuple(row) for row in connection.execute(ended_by)))
    return Findings(sum(states.values()), dict(states), dict(checks.n_failed_by_cause(run.parts.store)), tries, errors)


def figures(run: Run, found: Findings, leftovers: Sequence[str]) -> Report:
    """Return the rows; a promise is broken if one of them misses its target."""
    report = Report("chaos")
    injected = [each for each in run.injected if each.strike is not None]
    report.add("faults_injected", len(injected), "", planned=len(run.events))
    failed = sum(each.failed for each in run.injected)
    report.add("faults_that_found_nothing_to_strike", len(run.injected) - len(injected) - failed, "")
    report.add("faults_that_failed_to_strike", failed, "")
    states = {
        str(state): found.n_ended.get(state.value, 0) for state in (State.COMPLETED, State.FAILED, State.CANCELLED)
    }
    report.add("rollouts_run", found.n_rollouts, "", **states)
    for row, promises in _ROWS.items():
        report.add(row, sum(each.promise in promises for each in run.broken), "", at_most=0)
    report.add("leftovers", len(leftovers), "", at_most=0)
    rest = sum(each.promise not in frozenset().union(*_ROWS.values()) for each in run.broken)
    report.add("other_promises_broken", rest, "", at_most=0)
    report.add("given_up", sum(found.given_up.values()), "", **found.given_up)
    n_wasted, n_tries = wasted(found.tries)
    ends = Counter(each.result or "?" for each in found.tries)
    report.add("stages_run_in_vain", 100 * n_wasted / max(1, n_tries), "%", **ends)
    times = [seconds for each in _again(run, found).values() for seconds in each]
    if times:
        report.times("from_a_fault_to_the_same_stage_again", times)
    return report


def _again(run: Run, found: Findings) -> dict[str, list[float]]:
    """Return the recovery times in seconds by kind of fault, without those recorded by a wrong clock."""
    by_kind = recoveries(_hits(run.injected), found.tries)
    return {kind: [seconds for seconds in times if 0 <= seconds < _WRONG_S] for kind, times in by_kind.items()}


def _hits(injected: Sequence[Injected]) -> list[Hit]:
    return [
        Hit(each.event.kind, each.at, each.strike.owners, each.strike.attempts)
        for each in injected
        if each.strike is not None
    ]


def by_kind(run: Run, found: Findings) -> dict[str, dict[str, Any]]:
    """Return for each kind of fault: its number, the number of lost rollouts that ran again, and after how long."""
    again = _again(run, found)
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({each.event.kind for each in run.injected}):
        mine = [each for each in run.injected if each.event.kind == name]
        seconds = sorted(again.get(name, []))
        rows[name] = {"injected": sum(each.strike is not None for each in mine)}
        rows[name] |= {"not_injected": len(mine) - rows[name]["injected"], "rollouts_hit": len(seconds)}
        if seconds:
            p99 = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]
            rows[name] |= {"p50_s": statistics.median(seconds), "p99_s": p99}
    return rows


def show(run: Run, found: Findings, leftovers: Sequence[str], about: dict[str, Any], file: Path | None) -> None:
    """Print everything, and write it as JSON."""
    report, kinds = figures(run, found, leftovers), by_kind(run, found)
    report.title = "chaos: " + ", ".join(f"{name} {value}" for name, value in about.items())
    report.show(None)
    console = Console(width=140)
    console.print(_table(kinds))
    lines = [f"BROKEN {each}" for each in run.broken] + [f"LEFT {line}" for line in leftovers]
    for line in lines[:_SHOWN]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(f"and {len(lines) - _SHOWN} more, which the JSON has")
    if file is not None:
        everything = {
            "about": about,
            "figures": report.rows,
            "kinds": kinds,
            "errors": found.errors,
            "broken": [asdict(each) for each in run.broken],
            "leftovers": list(leftovers),
            "faults": [_fault(each) for each in run.injected],
        }
        file.write_text(json.dumps(everything, indent=2) + "\n")


def _table(kinds: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="faults", title_justify="left")
    for column in ("kind", "injected", "nothing to strike", "rollouts hit", "again p50, s", "again p99, s"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for name, row in kinds.items():
        times = [f"{row[key]:.2f}" if key in row else "" for key in ("p50_s", "p99_s")]
        counts = [str(row[key]) if row[key] else "" for key in ("injected", "not_injected", "rollouts_hit")]
        table.add_row(name.replace("_", " "), *counts, *times)
    return table


def _fault(each: Injected) -> dict[str, Any]:
    target = each.strike.target if each.strike is not None else None
    return {"at": each.at, **asdict(each.event), "target": target, "why_not": each.why}


def kept(broken: Sequence[BrokenPromise], leftovers: Sequence[str]) -> bool:
    """Return whether every promise was kept and nothing was left behind."""
    return not broken and not leftovers
