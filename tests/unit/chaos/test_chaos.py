"""Pure parts of the chaos run: its plan, the rewards of its problems, and its reading of journals and attempts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.chaos import problems, report
from tests.chaos.__main__ import _keep
from tests.chaos.checks import BrokenPromise
from tests.chaos.client import Journal, Order, read
from tests.chaos.faults import KINDS, deck
from tests.chaos.plan import digest, plan
from tests.chaos.recovery import Hit, Try, recoveries, wasted
from tests.chaos.run import Run


def test_the_same_seed_gives_the_same_plan() -> None:
    first, again, other = (plan(seed, 30, 3.0, deck()) for seed in (7, 7, 8))
    assert first == again
    assert digest(first) == digest(again) != digest(other)


def test_half_an_hour_has_five_hundred_faults_of_every_kind() -> None:
    for seed in range(5):
        events = plan(seed, 30, 3.0, deck())
        assert len(events) > 500
        assert {event.kind for event in events} == KINDS.keys()
        assert all(before.at_s <= after.at_s for before, after in pairwise(events))
        assert events[-1].at_s < 30 * 60


def test_plan_without_a_server_has_no_faults_of_that_server() -> None:
    assert not any("postgres" in kind for kind in deck("sqlite"))
    assert deck("sqlite").keys() < deck().keys()
    assert deck().keys() - deck(broker="rabbitmq").keys() == {"copy_queues"}


def test_logs_of_all_parts_are_copied(tmp_path: Path) -> None:
    written = ("logs/node0.log", "clients/client0.jsonl", "postgres.log")
    for name in (*written, "scratch/layer"):
        path = tmp_path / "farm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "kept").mkdir()
    _keep(tmp_path / "farm", tmp_path / "kept")
    kept = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert kept == {*written}


@pytest.mark.parametrize(
    ("promise", "row"),
    [
        ("conservation", "results_lost"),
        ("every rollout ends", "not_ended_in_time"),
        ("every batch ends", "not_ended_in_time"),
        ("every client is given its batches", "not_delivered_in_time"),
        ("every rollout ends once", "results_doubled"),
        ("nothing broken is scored", "wrongly_scored"),
        ("groups are whole", "other_promises_broken"),
    ],
)
def test_broken_promise_is_counted_only_in_its_own_row(promise: str, row: str) -> None:
    """A rollout that has not ended in time is not lost: it still exists."""
    run = cast(Run, SimpleNamespace(injected=[], events=[], broken=[BrokenPromise(promise, "b1.0.0", "so it was")]))
    rows = report.figures(run, report.Findings(1, {}, {}, [], {}), []).rows
    missed = {name: figure["value"] for name, figure in rows.items() if figure.get("reached") is False}
    assert missed == {row: 1}


def test_successor_client_sends_the_same_batch(tmp_path: Path) -> None:
    first, other = (Order(name, 1, "", "", str(tmp_path)) for name in ("client0", "client1"))
    problems.write(first.instances)
    assert first.request(3) == Order(**json.loads(first.argv()[-1])).request(3)
    assert first.request(3).instances != other.request(3).instances
    keys = {order.request(number).idempotency_key for order in (first, other) for number in range(3)}
    assert len(keys) == 6


def test_samples_of_one_problem_have_different_and_predictable_rewards() -> None:
    worth = problems.ExpectedScore(seed=1)
    for instance in problems.instances():
        rewards = [worth.reward(instance.instance_id, 5, 0, sample) for sample in range(30)]
        assert 1.0 in rewards
        assert min(rewards) < 1.0
        assert rewards == [worth.reward(instance.instance_id, 5, 0, sample) for sample in range(30)]
    assert worth.reward(problems.noop(2.0).instance_id, 5, 0, 0) == 1.0


def test_journal_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert (journal.next, journal.unfinished) == (0, False)
    journal.write(begin=0)
    journal.write(done=0)
    journal.write(begin=1)
    with path.open("ab") as file:
        file.write(b'{"begin": 1, "torn')
    after = Journal(path)
    assert (after.next, after.unfinished) == (1, True)
    after.write(done=1)
    assert [line for line in read(path) if "done" in line] == [{"done": 0}, {"done": 1}]


def _try(attempt: int, stage: str, started_at: float, result: str | None, worker: str = "one/run/12") -> Try:
    return Try("b.0.0", attempt, stage, worker, started_at, started_at + 5, result)


@pytest.mark.parametrize("hit", [Hit("kill", 12.0, ("one/run/12",), ()), Hit("kill", 12.0, ("one/",), ())])
def test_recovery_time_runs_from_the_fault_to_the_same_stage_of_a_later_attempt(hit: Hit) -> None:
    tries = [
        _try(1, "init", 4.0, "advanced"),
        _try(1, "run", 10.0, "lost"),
        _try(2, "init", 15.0, "advanced", "two/init/3"),
        _try(2, "run", 20.0, "advanced", "two/run/4"),
    ]
    assert recoveries([hit], tries) == {"kill": [8.0]}
    assert wasted(tries) == (1, 4)


@pytest.mark.parametrize(
    "hit",
    [
        Hit("kill", 12.0, ("one/run/1",), ()),
        Hit("kill", 12.0, ("on/",), ()),
        Hit("kill", 9.0, ("one/run/12",), ()),
        Hit("kill", 16.0, ("one/run/12",), ()),
        Hit("kill", 12.0, (), (("b.0.0", 2),)),
        Hit("kill", 12.0, (), ()),
    ],
)
def test_attempt_that_the_fault_did_not_interrupt_is_not_timed(hit: Hit) -> None:
    tries = [_try(1, "run", 10.0, "lost"), _try(2, "run", 20.0, "advanced", "two/run/4")]
    assert recoveries([hit], tries) == {}


def test_attempt_that_succeeded_is_not_counted_as_hit() -> None:
    tries = [_try(1, "run", 10.0, "advanced"), _try(2, "run", 20.0, "advanced")]
    assert recoveries([Hit("kill", 12.0, ("one/",), ())], tries) == {}
