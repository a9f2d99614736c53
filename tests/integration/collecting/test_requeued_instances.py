"""Instances of a step's leftovers are requeued: none is lost, none trains twice, and usable samples are kept."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farm.adapters.arrays import arrays
from farm.client.remote import RemoteFarm
from farm.collecting import CollectedStep, ShuffledInstances, StepCollector
from farm.collecting.waves import Wave, wave_key
from farm.errors import InvalidRequest
from farm.records.rollout import Group, State
from farm.records.trajectory import NO_VERSION
from farm.store.database import Store
from tests.integration.collecting.scripted_run import KilledClient, ProcessKilled, ScriptedRun, numbers, problems
from tests.services.api import KEY, served
from tests.services.soak import at_length

FOUR = (0.0, 1.0, 1.0, 0.0)
N = 3
KINDS: list[tuple[float | None, ...]] = [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (0.0, None, 1.0)]
"""Rewards of the three samples of an instance: two kinds differ, one is equal, and one has a broken sample."""


def complete_in_parts(run: ScriptedRun, *sizes: int) -> Any:
    """Complete so many samples at each wait, in the order of their requests, then one at a time."""
    left = list(sizes)
    return lambda seconds: run.scripted.run_next(left.pop(0) if left else 1) and None


def ids(step: CollectedStep) -> list[list[str]]:
    return [[rollout.rollout_id for rollout in group.rollouts] for group in step.groups]


@pytest.mark.parametrize("numbered", [True, False], ids=["versions", "steps"])
def test_finished_samples_train_in_the_next_step(sqlite_store: Store, numbered: bool) -> None:
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(9), FOUR))
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 2, "n_samples": 4}
    options |= {"leftovers": "cancel", "max_staleness": 1}
    if numbered:
        run.set_version(1)
    # all of 0 and three of 1
    collector = run.collector(wait=complete_in_parts(run, 7), **options)
    first = collector.collect(1)
    assert (numbers(first), first.n_cancelled, first.n_open) == ([0], 1, 0)
    if numbered:
        run.set_version(2)
    second = collector.collect(2)
    assert (numbers(second), second.n_requeued) == ([1], 1)
    (group,) = second.groups
    assert run.n_samples_run()["algebra-1"] == 4, "three of the first step, and the one that was missing"
    assert len({rollout.group_id for rollout in group.rollouts}) == 1
    assert sorted(rollout.sample_index for rollout in group.rollouts) == [0, 1, 2, 3]
    assert len({rollout.rollout_id.partition(".")[0] for rollout in group.rollouts}) == 2
    if numbered:
        assert sorted(rollout.version_min or 0 for rollout in group.rollouts) == [1, 1, 1, 2]
    rows = arrays(second.rollouts)
    assert (len(set(rows.group_ids.tolist())), rows.rewards.size) == (1, 4)
    assert (second.trained.n_samples, second.trained.n_tokens) == (4, 8)
    assert (second.requested.n_samples, second.requested.n_groups) == (4, 2), "what is kept counts once"
    # also for later clients, and over HTTP
    with served(run.client) as url:
        remote = RemoteFarm(url, KEY)
        for again in (run.collector(**options), run.collector(client=remote, **options)):
            assert ids(again.collect(2)) == ids(second)
            assert (again.collect(2).trained, again.collect(2).requested) == (second.trained, second.requested)
        assert [each.fields for each in remote.runs.instances([group.group_id])] == [{"i": 1}]
        remote.close()


def test_too_old_samples_are_run_again(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(9), FOUR))
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 2, "n_samples": 4}
    run.set_version(1)
    collector = run.collector(wait=complete_in_parts(run, 7), **options)
    assert numbers(collector.collect(1)) == [0]
    run.set_version(2)
    second = collector.collect(2)
    assert (numbers(second), second.n_requeued) == ([1], 1)
    assert {rollout.version_min for rollout in second.rollouts} == {2}
    assert run.n_samples_run()["algebra-1"] == 7
    assert all(rollout.rollout_id.startswith(rollout.batch_id) for rollout in second.rollouts)


def test_samples_of_unchanged_weights_are_kept_on_policy(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(9), FOUR))
    run.set_version(1)
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 2, "n_samples": 4}
    collector = run.collector(wait=complete_in_parts(run, 7), **options)
    assert [numbers(collector.collect(step)) for step in (1, 2)] == [[0], [1]]
    assert run.n_samples_run()["algebra-1"] == 4


def test_kept_samples_are_dropped_when_too_old(sqlite_store: Store) -> None:
    # of 1 and 2 two samples each end in every step; 0, 3, 4 are complete at once
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(20), FOUR))
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 3, "n_samples": 4}
    options |= {"leftovers": "cancel", "max_staleness": 1}

    def complete_some(seconds: float) -> None:
        by_group: dict[str, list[Any]] = {}
        for each in run.scripted.queued():
            by_group.setdefault(each.instance_id, []).append(each)
        for name, members in by_group.items():
            slow = name in ("algebra-1", "algebra-2")
            run.scripted.finish(members[:1] if slow else members)

    collector = run.collector(wait=complete_some, **options)
    chosen: list[int] = []
    for step in (1, 2, 3, 4, 5):
        run.set_version(step)
        collected = collector.collect(step)
        chosen += numbers(collected)
        assert {rollout.version_min for rollout in collected.rollouts} <= {step - 1, step}
    assert chosen[0] == 0
    assert len(chosen) == len(set(chosen)) == 5


def test_early_stop_counts_kept_samples(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(9), FOUR))
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 2, "n_samples": 4, "max_staleness": 1}
    options |= {"leftovers": "cancel", "early_stop_samples": 3, "min_samples": 3}
    # three of 0 are enough; of 1 two have ended then
    queue = run.scripted.queued
    finish_orders = [lambda: [queue()[at] for at in (0, 1, 2, 4, 5)]]

    def complete_some(seconds: float) -> None:
        run.scripted.finish(finish_orders.pop()() if finish_orders else queue()[:1])

    collector = run.collector(wait=complete_some, **options)
    assert numbers(collector.collect(1)) == [0]
    (group,) = collector.collect(2).groups
    assert sorted(str(rollout.state) for rollout in group.rollouts) == ["cancelled", *["completed"] * 3]
    assert run.n_samples_run()["algebra-1"] == 3


def test_instance_with_its_own_engine_key_is_refused_before_it_runs(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    engine = {"engine_url": "http://engine/v1"}
    run.sampler = ShuffledInstances([each | engine | {"engine_key": "a-secret-key"} for each in problems(3)])
    with pytest.raises(InvalidRequest, match="never shown") as error:
        run.collector().collect(1)
    assert error.value.field == "engine_key"
    assert run.scripted.queued() == []
    run.sampler = ShuffledInstances([each | engine for each in problems(3)])
    with pytest.raises(TimeoutError):
        run.collector().collect(1, timeout_s=0.0)
    batch = run.client.runs.keyed_batches([wave_key("r", 0)])[0].batch_id
    assert run.client.runs.instances([f"{batch}.0"])[0].engine_url == "http://engine/v1"


class OvertakenClient:
    """A real client that another trainer overtakes right before it records a step."""

    def __init__(self, client: Any, between: Callable[[], object]) -> None:
        self._client = client
        self._between = between

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        return OvertakenClient(value, self._between) if name == "runs" else value

    def record_step(self, *args: Any) -> Any:
        self._between()
        return self._client.record_step(*args)


def test_group_chosen_and_requeued_concurrently_trains_once(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 2, "max_staleness": 1}
    options["wait"] = lambda seconds: run.scripted.run_next()

    def between() -> None:
        if run.scripted.version == 2:
            run.set_version(3)
            run.collector(**options).keep_ahead()

    client: Any = OvertakenClient(run.client, between)
    first = run.collector(client=client, **options)
    run.set_version(1)
    assert numbers(first.collect(1)) == [0]
    run.set_version(2)
    assert numbers(first.collect(2)) == [1]
    # group 1 had become too old for the other trainer, which requested its instance again
    requeued = [
        batch.batch_id
        for number in range(9)
        for batch in run.client.runs.keyed_batches([wave_key("r", number)])
        if batch.metadata["collecting"].get("requeued")
    ]
    assert len(requeued) == 1
    rest = [numbers(collector.collect(3)) for collector in (first, run.collector(**options))]
    assert rest == [[2], [2]]
    assert {str(each.state) for each in run.client.rollouts(requeued[0])} == {"cancelled"}
    assert numbers(first.collect(4)) != [1]


class RandomRun:
    """A run with random options whose trainer is killed now and then, and resumes at its step or up to two before."""

    def __init__(self, run: ScriptedRun, name: str, options: dict[str, Any], version: int | None, seed: int) -> None:
        self.run = run
        self.name = name
        self.options = options
        self.version = version
        self.drawn = random.Random(seed)
        self.steps: list[CollectedStep] = []
        run.kinds = {each: self.drawn.choice(KINDS) for each in range(200)}

    def collect(self, n_steps: int) -> None:
        collector = self.collector()
        for step in range(n_steps):
            self.run.scripted.version = NO_VERSION
            if self.version is not None:
                self.version += self.drawn.choice([0, 1, 1, 1, 2])
                self.run.set_version(self.version)
            while self.drawn.random() < 0.4:
                self.is_killed(step)
                collector = self.collector()
                for before in range(max(0, step - 2), step):
                    assert ids(collector.collect(before)) == ids(self.steps[before])
            self.steps.append(collector.collect(step))
            self.check_bounds(self.steps[-1])

    def collector(self, client: Any = None) -> StepCollector:
        client = client or self.run.client
        wait = client.killable(self.complete_some) if isinstance(client, KilledClient) else self.complete_some
        return self.run.collector(self.name, client, wait, n_samples=N, max_num_gen_batches=0, **self.options)

    def complete_some(self, seconds: float) -> None:
        """End some queued samples, in any order."""
        queued = self.run.scripted.queued()
        self.run.scripted.finish(self.drawn.sample(queued, min(len(queued), self.drawn.randint(1, 6))))

    def is_killed(self, step: int) -> None:
        """Begin a step, and end at one of its first moments, or right after it."""
        with suppress(ProcessKilled):
            self.collector(KilledClient(self.run.client, count(), self.drawn.randint(0, 12))).collect(step)

    def check_bounds(self, step: CollectedStep) -> None:
        assert len(step.groups) == self.options["train_batch_size"]
        stop, bound = self.options["early_stop_samples"], self.options["max_staleness"]
        for group in step.groups:
            rewards = [each.reward for each in group.rollouts if each.trainable]
            assert (len(group.rollouts), len(set(rewards))) == (N, 2)
            assert len(rewards) >= (self.options["min_samples"] or stop or N)
            if len(rewards) < (stop or N):
                assert not any(each.state is State.CANCELLED for each in group.rollouts)
            if self.version is not None and bound is not None:
                assert all(self.version - (each.version_min or 0) <= bound for each in group.rollouts if each.trainable)

    def check_nothing_is_lost(self) -> None:
        """Account for every group by its rollouts: it trained once, was dropped for them, waits, or is requeued."""
        runs = self.run.client.runs
        newest = runs.recorded_step(self.name)
        assert newest is not None
        record, whole, replaced = newest.record, dict[str, Group](), Counter[str]()
        requested: dict[str, int] = {}
        fresh: list[int] = []
        for number in range(record["next_wave"]):
            (batch,) = runs.keyed_batches([wave_key(self.name, number)])
            wave = Wave.of(number, batch)
            wave.poll(self.run.client, batch.cursor)
            whole |= {group.group_id: group for group in wave.whole.values()}
            replaced.update(each.group_id for each in wave.requeued)
            members = self.run.client.rollouts(batch.batch_id)
            requested |= {each.group_id: int(each.instance_id.rpartition("-")[2]) for each in members}
            if not wave.requeued:
                fresh += [requested[f"{batch.batch_id}.{index}"] for index in range(wave.n_groups)]
        assert sorted(fresh) == list(range(record["sampler"]["drawn"])), "each once in the epoch"
        assert set(replaced.values()) <= {1}
        trained = [group.group_id for step in self.steps for group in step.groups]
        waiting = {
            f"{wave['batch_id']}.{index}"
            for wave in record["open"]
            for index in set(range(wave["n_groups"])) - set(wave["settled"])
        }
        dropped = requested.keys() - replaced.keys() - set(trained) - waiting
        ends = [requested[each] for each in (*trained, *waiting, *dropped)]
        assert sorted(ends) == sorted(fresh), "each has one end"
        assert len(dropped) == sum(sum(step.n_dropped.values()) for step in self.steps)
        for each in dropped:
            rewards = [rollout.reward for rollout in whole[each].rollouts if rollout.trainable]
            n_stopped = sum(rollout.state is State.CANCELLED for rollout in whole[each].rollouts)
            least = self.options["min_samples"] or self.options["early_stop_samples"] or N
            assert len(set(rewards)) < 2 or len(rewards) < least
            assert not n_stopped or len(rewards) >= (self.options["early_stop_samples"] or N)
        samples = [rollout.rollout_id for step in self.steps for rollout in step.rollouts]
        assert len(samples) == len(set(samples))


@st.composite
def random_options(draw: st.DrawFn) -> dict[str, Any]:
    staleness = draw(st.sampled_from([0, 1, 2, None]))
    size = draw(st.integers(1, 2))
    return {
        "train_batch_size": draw(st.integers(1, 3)),
        "gen_batch_size": size,
        "max_inflight_groups": draw(st.none() | st.integers(size, 6)),
        "max_staleness": staleness,
        "leftovers": draw(st.sampled_from([None, "cancel"] + ["carry_over"] * (staleness != 0))),
        "min_samples": draw(st.sampled_from([None, 2])),
        "early_stop_samples": draw(st.sampled_from([None, None, 2])),
    }


@pytest.mark.soak
@examples(max_examples=at_length(8, 300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=random_options(), numbered=st.booleans(), seed=st.integers(0, 2**32))
def test_every_instance_is_trained_dropped_or_waiting(
    sqlite_store: Store, options: dict[str, Any], numbered: bool, seed: int
) -> None:
    if options["early_stop_samples"] is not None:
        options["min_samples"] = 2
    run = ScriptedRun(sqlite_store, {})
    newest = int(run.client.newest_version() or 0)
    of = RandomRun(run, f"drawn-{secrets.token_hex(4)}", options, newest + 1 if numbered else None, seed)
    of.collect(4)
    of.check_nothing_is_lost()
    # running rollouts belong to nobody when the next run begins
    run.scripted.run_next()
