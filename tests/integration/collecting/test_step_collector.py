"""Collecting on a real store: the groups of each step match those computed by hand, whoever is killed when."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from farm.client.farm import Farm
from farm.client.remote import RemoteFarm
from farm.collecting import CollectingOptions, Curriculum, Mixture, ShuffledInstances, StepCollector
from farm.errors import InvalidRequest, StoreWentBack
from farm.records.rollout import Group
from farm.store.database import Store
from farm.store.rollouts import batches
from tests.integration.collecting.scripted_run import (
    BROKEN,
    EQUAL,
    N_SAMPLES,
    KilledClient,
    ProcessKilled,
    ScriptedRun,
    numbers,
    problems,
    states,
)
from tests.services.api import KEY, served

KINDS: dict[int, tuple[float | None, ...]] = {0: EQUAL, 2: EQUAL, 4: BROKEN, 7: EQUAL}
"""Three are in flight at a time and end in order: 1, 3 and 5 make the first step, 6 and 7 are then in flight."""


def test_step_takes_first_groups_with_unequal_rewards_and_requeues_others(store: Store) -> None:
    run = ScriptedRun(store, KINDS)
    first = run.collector().collect(1)
    assert numbers(first) == [1, 3, 5]
    assert first.n_dropped == {"equal_rewards": 2, "too_few_scored": 1}
    assert (first.n_cancelled, first.n_requeued, first.n_carried, first.n_open) == (2, 0, 0, 0)
    assert [rollout.reward for rollout in first.rollouts] == [0.0, 1.0] * 3
    assert all(len(rollout.segments) == 1 for rollout in first.rollouts)
    waves = [run.client.runs.keyed_batches([f"r:wave-{n}"])[0].batch_id for n in range(8)]
    assert states(run.client, waves[6:]) == ["cancelled"] * 4
    assert "cancelled" not in states(run.client, waves[:6])
    # before fresh ones
    second = run.collector().collect(2)
    assert numbers(second) == [6, 8, 9]
    assert (second.n_dropped, second.n_requeued, second.n_carried) == ({"equal_rewards": 1}, 2, 0)
    assert set(run.n_samples_run().values()) == {N_SAMPLES}, "cancelled rollouts had not run"


def test_groups_with_equal_rewards_are_kept_with_filter_keep(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, KINDS)
    assert numbers(run.collector(filter_groups="keep").collect(1)) == [0, 1, 2]


def test_group_with_failed_members_is_kept_if_enough_are_scored(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {1: BROKEN, 2: (None, None)})
    step = run.collector(filter_groups="keep", min_samples=1).collect(1)
    assert numbers(step) == [0, 1, 3]
    assert [rollout.reward for rollout in step.groups[1].rollouts] == [1.0, None]
    assert step.n_dropped == {"too_few_scored": 1}


def test_group_with_enough_samples_cancels_the_remaining(store: Store) -> None:
    run = ScriptedRun(store, {0: (1.0, None, 0.0, 1.0), 1: (1.0, 0.0, 1.0, 0.0), 2: (None, None, None, 1.0)})
    options: dict[str, Any] = {"train_batch_size": 1, "max_inflight_groups": 1, "min_samples": 2}
    options["early_stop_samples"] = 2
    finished: list[int] = []

    def complete_one(seconds: float) -> None:
        run.scripted.run_next(1)
        finished.append(len(run.scripted.finished))

    collector = run.collector(wait=complete_one, n_samples=4, **options)
    first, second = collector.collect(1), collector.collect(2)
    assert (numbers(first), numbers(second)) == ([0], [1])
    # the broken one is no sample: the first group needs three to have two
    assert [[rollout.state for rollout in step.groups[0].rollouts] for step in (first, second)] == [
        ["completed", "failed", "completed", "cancelled"],
        ["completed", "completed", "cancelled", "cancelled"],
    ]
    assert len(run.scripted.finished) == 5
    again = run.collector(n_samples=4, **options).collect(2)
    assert [each.rollout_id for each in again.rollouts] == [each.rollout_id for each in second.rollouts]


def test_accept_function_of_the_trainer_filters_groups(sqlite_store: Store) -> None:
    def odd(group: Group) -> bool:
        return int(group.rollouts[0].instance_id[-1]) % 2 == 1

    step = ScriptedRun(sqlite_store, {}).collector(accept=odd).collect(1)
    assert numbers(step) == [1, 3, 5]
    assert step.n_dropped == {"refused": 3}


def test_carried_over_groups_run_once(store: Store) -> None:
    run = ScriptedRun(store, KINDS)
    collector = run.collector(leftovers="carry_over", max_staleness=1)
    steps = [collector.collect(number) for number in (1, 2, 3)]
    assert [numbers(step) for step in steps] == [[1, 3, 5], [6, 8, 9], [10, 11, 12]]
    assert [step.n_carried for step in steps] == [0, 1, 2]
    assert steps[1].n_dropped == {"equal_rewards": 1}
    assert [step.n_cancelled for step in steps] == [0, 0, 0]
    assert set(run.n_samples_run().values()) == {N_SAMPLES}


def test_groups_that_end_after_a_step_is_full_wait_for_the_next(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    collector = run.collector(leftovers="carry_over", max_staleness=1, wait=lambda s: run.scripted.run_next() and None)
    # all three in flight end at once, and again, with two of them beyond a step of one
    small = run.collector(
        train_batch_size=1,
        max_inflight_groups=2,
        leftovers="carry_over",
        max_staleness=1,
        wait=lambda s: run.scripted.run_next() and None,
    )
    assert numbers(small.collect(1)) == [0]
    assert len(run.scripted.finished) == 2 * N_SAMPLES
    assert numbers(small.collect(2)) == [1]
    assert len(run.scripted.finished) == 2 * N_SAMPLES
    assert numbers(collector.collect(3)) == [2, 3, 4]


def test_carried_groups_of_too_old_weights_are_requeued(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    run.set_version(1)
    collector = run.collector(
        max_inflight_groups=5, leftovers="carry_over", max_staleness=1, wait=lambda s: run.scripted.run_next() and None
    )
    # five end at once under version 1: three train, two wait
    assert numbers(collector.collect(1)) == [0, 1, 2]
    run.set_version(2)
    step = collector.collect(2)
    assert numbers(step) == [3, 4, 5]
    assert [group.rollouts[0].version_min for group in step.groups] == [1, 1, 2]
    # of the second wave of version 2, waiting groups are two versions behind in step 4
    run.set_version(4)
    fourth = collector.collect(4)
    assert {rollout.version_min for rollout in fourth.rollouts} == {4}
    assert (numbers(fourth), fourth.n_requeued, fourth.n_dropped) == ([6, 7, 8], 3, {})


def test_restarted_trainer_gets_the_same_groups(store: Store) -> None:
    run = ScriptedRun(store, KINDS)
    options: dict[str, Any] = {"leftovers": "carry_over", "max_staleness": 1}
    steps = [run.collector(**options).collect(number) for number in (1, 2, 3)]
    n_finished = len(run.scripted.finished)
    restarted = run.collector(**options)
    again = [restarted.collect(number) for number in (1, 2, 3)]
    assert [numbers(step) for step in again] == [numbers(step) for step in steps]
    assert [group.group_id for step in again for group in step.groups] == [
        group.group_id for step in steps for group in step.groups
    ]
    assert (again[1].n_dropped, again[1].n_carried) == (steps[1].n_dropped, steps[1].n_carried)
    assert all(rollout.segments for step in again for rollout in step.rollouts)
    assert len(run.scripted.finished) == n_finished
    # and continues from there
    assert numbers(restarted.collect(4)) == [13, 14, 15]


KINDS_OF_FEW: dict[int, tuple[float | None, ...]] = {**dict.fromkeys(range(100), EQUAL), 4: (0.0, 1.0)}


@pytest.mark.parametrize(
    "options",
    [{}, {"leftovers": "cancel", "max_staleness": 1}, {"max_staleness": 1}],
    ids=["cancel", "cancel_and_keep", "carry_over"],
)
def test_trainer_killed_at_any_moment_loses_and_repeats_nothing(sqlite_store: Store, options: dict[str, Any]) -> None:
    # two are in flight: 0 is dropped, 1 is the first step, and 2 is then in flight
    expected = [[1], [2]]
    run = ScriptedRun(sqlite_store, {0: EQUAL})
    options = {"train_batch_size": 1, "max_inflight_groups": 2, **options}
    for number in count():
        name = f"killed-{number}"
        run.scripted.finished.clear()
        moments = count()
        dying_client: Any = KilledClient(run.client, moments, number)
        collector = run.collector(name, dying_client, dying_client.killable(run.complete_group), **options)
        try:
            assert [numbers(collector.collect(step)) for step in (1, 2)] == expected
            break
        except ProcessKilled:
            restarted = run.collector(name, **options)
            assert [numbers(restarted.collect(step)) for step in (1, 2)] == expected, number
        finished = [0, 1, *expected[1]]
        assert run.n_samples_run() == {f"algebra-{i}": N_SAMPLES for i in finished}, number
        # running rollouts belong to nobody when the next run begins
        run.scripted.run_next()
    assert number >= 8


def test_concurrent_trainers_of_one_run_get_the_same_groups(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, KINDS)
    first, second = run.collector(), run.collector()
    steps = []
    for number in (1, 2, 3):
        one, other = first.collect(number), second.collect(number)
        assert numbers(one) == numbers(other)
        steps.append(numbers(one))
    # the second asks for the position of the first in the middle of a step
    third = run.collector(wait=lambda s: steps.append(numbers(second.collect(4))))
    assert numbers(third.collect(4)) == steps[3]
    assert steps[:3] == [[1, 3, 5], [6, 8, 9], [10, 11, 12]]


def test_threads_of_one_trainer_collect_sequentially(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, KINDS)
    started: Future[Any] = Future()

    def complete_and_start(seconds: float) -> None:
        if not started.done():
            started.set_result(pool.submit(collector.collect, 2))
        run.complete_group()

    with ThreadPoolExecutor(1) as pool:
        collector = run.collector(wait=complete_and_start)
        assert numbers(collector.collect(1)) == [1, 3, 5]
        assert numbers(started.result().result()) == [6, 8, 9]


def test_restored_older_store_is_reported(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})

    def go_back(seconds: float) -> None:
        sqlite_store.write(lambda connection: connection.execute(batches.delete()) and None)

    with pytest.raises(StoreWentBack, match="of run r existed"):
        run.collector(wait=go_back).collect(1)


def test_accept_function_is_called_once_per_group(sqlite_store: Store) -> None:
    run, calls = ScriptedRun(sqlite_store, {}), list[str]()

    def note(group: Group) -> bool:
        calls.append(group.group_id)
        return True

    run.collector(accept=note).collect(1)
    assert len(calls) == len(set(calls)) == 3


def test_step_with_too_few_groups_fails_and_continues_with_a_higher_limit(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, KINDS_OF_FEW, n_instances=100)
    with pytest.raises(InvalidRequest, match="1 of 3 groups") as error:
        run.collector(max_num_gen_batches=4).collect(1)
    assert error.value.field == "max_num_gen_batches"
    assert "{'equal_rewards': 11}" in str(error.value)
    assert len(run.scripted.finished) == 12 * N_SAMPLES
    run.kinds = {**run.kinds, 12: (0.0, 1.0), 14: (0.0, 1.0)}
    # nothing is repeated: twelve have run, three are new
    assert numbers(run.collector(max_num_gen_batches=5).collect(1)) == [4, 12, 14]
    assert len(run.scripted.finished) == 15 * N_SAMPLES


def test_step_that_timed_out_can_be_collected_again(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    collector = run.collector(wait=lambda s: None)
    with pytest.raises(TimeoutError, match="step 1 of run r: 0 of 3 groups"):
        collector.collect(1, timeout_s=0.0)
    run.scripted.run_next()
    assert numbers(collector.collect(1)) == [0, 1, 2]


def test_invalid_arguments_are_refused_by_field_before_anything_runs(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    for wrong, field in (
        ({"idempotency_key": "k"}, "request.idempotency_key"),
        ({"max_staleness": 3}, "request.max_staleness"),
        ({"metadata": {"collecting": 1}}, "request.metadata.collecting"),
        ({"limits": {"max_turns": 0}}, "limits.max_turns"),
    ):
        with pytest.raises(InvalidRequest) as error:
            StepCollector(run.client, "r", run.sampler, CollectingOptions(2), {"n_samples": 2, **wrong})
        assert error.value.field == field
    collector = run.collector()
    collector.collect(7)
    for step in (-1, 1.5, 3):
        with pytest.raises(InvalidRequest) as error:
            collector.collect(step)  # type: ignore[arg-type]
        assert error.value.field == "step"
    run.client.submit({"instances": problems(1, "algebra"), "idempotency_key": "taken:wave-0"})
    with pytest.raises(InvalidRequest, match="taken:wave-0") as error:
        run.collector("taken").collect(1)
    assert error.value.field == "run"
    run.sampler = ShuffledInstances([{"data_source": "noop", "instance_id": "bad", "fields": {"turns": "many"}}])
    with pytest.raises(InvalidRequest) as error:
        run.collector("other").collect(1)
    assert error.value.field.startswith("instance 'bad' of noop.fields")


def test_curriculum_excludes_always_and_never_solved_instances(store: Store) -> None:
    # solved of 2: all of 0 and 3, none of 1, half of 2, 4 and 5
    run = ScriptedRun(store, {0: EQUAL, 1: (0.0, 0.0), 3: EQUAL})
    run.sampler = Curriculum(
        ShuffledInstances(problems(6), shuffle=False), run.client, "r", min_scored=2, last_versions=2
    )
    run.set_version(1)
    collector = run.collector(filter_groups="keep", max_inflight_groups=1)
    assert numbers(collector.collect(1)) == [0, 1, 2]
    run.set_version(2)
    # 3, 4 and 5 are new; of the first three two are left out from now on
    assert numbers(collector.collect(2)) == [3, 4, 5]
    run.set_version(3)
    # of versions 2 and 3, nothing is known of 0, 1 and 2 any more; 3 is left out
    assert numbers(collector.collect(3)) == [0, 1, 2]
    assert numbers(collector.collect(4)) == [4, 5, 2]


def test_curriculum_without_remaining_instances_is_an_error(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, dict.fromkeys(range(3), EQUAL))
    run.sampler = Curriculum(ShuffledInstances(problems(3)), run.client, "r")
    collector = run.collector(filter_groups="keep")
    collector.collect(1)
    with pytest.raises(InvalidRequest, match="all 3 instances of run r") as error:
        collector.collect(2)
    assert error.value.field == "easy_threshold"


def test_mixture_weights_hold_in_each_step(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, {})
    samplers = {name: ShuffledInstances(problems(50, name)) for name in ("algebra", "geometry")}
    run.sampler = Mixture(samplers, {"algebra": 2, "geometry": 1})
    steps = [run.collector(train_batch_size=6).collect(number) for number in (1, 2)]
    for step in steps:
        sources = [group.rollouts[0].data_source for group in step.groups]
        assert (sources.count("algebra"), sources.count("geometry")) == (4, 2)


def test_run_over_http_collects_the_same_groups(sqlite_store: Store) -> None:
    run = ScriptedRun(sqlite_store, KINDS)
    with served(run.client) as url:
        client: Farm = RemoteFarm(url, KEY)
        steps = [run.collector(client=client).collect(number) for number in (1, 2, 1)]
        assert [numbers(step) for step in steps] == [[1, 3, 5], [6, 8, 9], [1, 3, 5]]
        assert steps[2].rollouts[0].segments[0].response_ids.tolist() == [3, 4]
        assert client.runs.solve_rates("r", "algebra", ["algebra-1"])[0].rate == 0.5
        assert client.runs.recorded_step("nobody") is None
        client.close()
