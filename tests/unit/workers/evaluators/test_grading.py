"""Limits of scorers: extended while the machine makes them wait, and never while they compute or sleep."""

from __future__ import annotations

import asyncio
import sys

import pytest

from farm.errors import EvaluatorError
from workers.evaluators import grader, grading
from workers.evaluators.grader import _Scoring
from workers.evaluators.grading import Grader
from workers.evaluators.process_end import EndCause, doing

# replies to a request after this many seconds; each second before, it reports an extension of its limit by one
LATE_GRADER = """
import json, sys, time
print(json.dumps({"failure": ""}), flush=True)
number = json.loads(sys.stdin.readline())["id"]
for _ in range(int(sys.argv[1])):
    time.sleep(0.8)
    print(json.dumps({"id": number, "extended_s": 1.0}), flush=True)
time.sleep(float(sys.argv[2]))
end = {"code": None, "timed_out": True, "cpu_s": 0.1, "waited_s": 2.0, "limit_s": 3.0}
print(json.dumps({"id": number, "reply": None, "end": end}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("waited_s", "n_extended"),
    [((0.0, 9.0, 9.0), 0), ((2.4, 9.0, 9.0), 0), ((2.6, 4.0, 9.0), 1), ((9.0, 15.0, 29.0), 2)],
    ids=["never-waited", "hardly-waited", "waited-once", "waited-all-the-time"],
)
def test_limit_of_a_scorer_that_waits_for_a_cpu_is_extended_at_most_twice(
    waited_s: tuple[float, ...], n_extended: int
) -> None:
    scoring = _Scoring(1, 1, limit_s=10.0, deadline=10.0)
    seen = list(waited_s)
    while seen and scoring.extend(seen.pop(0)):
        pass
    assert (scoring.n_extensions, scoring.deadline) == (n_extended, 10.0 * (1 + n_extended))


@pytest.mark.parametrize(("n_extended", "then_s", "hangs"), [(2, 0.5, False), (0, 9.0, True)])
def test_client_waits_as_long_as_the_grader_reports(
    n_extended: int, then_s: float, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", LATE_GRADER, str(n_extended), str(then_s)]
    monkeypatch.setattr(grader, "command", lambda user, library: words)
    monkeypatch.setattr(grading, "_GRACE_PERIOD_S", 0.5)

    async def ask() -> grading.Graded:
        grader = Grader()
        try:
            return await grader.score("chain_sum", {}, "1", 0.5)
        finally:
            await grader.aclose()

    if hangs:
        with pytest.raises(EvaluatorError, match="the grader process hangs"):
            asyncio.run(ask())
        return
    graded = asyncio.run(ask())
    cause, reason = doing(graded.end)
    assert (cause, graded.end.limit_s) == (EndCause.FARM, 3.0)
    assert "the machine was late by 2.0 s while its 3.0 s passed" in reason
