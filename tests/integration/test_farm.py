"""A whole farm, on both databases: the promises to a client, with rollouts that need no sandbox and no LLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import farm
from farm.adapters.arrays import Arrays
from farm.adapters.trainer_step import TrainerRun
from farm.collecting import CollectingOptions, Producer, ShuffledInstances, StepCollector
from farm.embedded.embedded_farm import Embedded
from farm.errors import Conflict, FarmUnreachable, InvalidRequest, NotFound, UnknownHandler
from farm.evaluation import evaluate
from tests.doubles import EngineDouble
from tests.services.farms import NOOP, embedded, farm_folder, left_of
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTION = "How many hops?"
SCRIPT = Script(
    [
        ScriptedProblem(
            match=QUESTION,
            branches=(
                Branch(name="right", turns=(ScriptedTurn(content="three"),)),
                Branch(name="wrong", turns=(ScriptedTurn(content="four"),)),
            ),
        )
    ]
)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def here(request: pytest.FixtureRequest) -> Iterator[Embedded]:
    store_url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT, weight_version="0").app()) as policy,
        embedded(folder, store_url, FARM_POLICY_URL=f"{policy}/v1") as started,
    ):
        yield started


@pytest.fixture(scope="module")
def client(here: Embedded) -> Iterator[farm.Farm]:
    with farm.connect(here.store_url, broker_url=here.broker_url) as connected:
        yield connected


def noop(**fields: Any) -> dict[str, Any]:
    return {"data_source": "noop", "fields": fields}


def test_batch_is_run_and_collected_in_order(client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [NOOP] * 20, "n_samples": 3})
    rollouts = client.collect(batch_id, timeout_s=600)
    assert [rollout.rollout_id for rollout in rollouts] == [f"{batch_id}.{g}.{s}" for g in range(20) for s in range(3)]
    assert all(rollout.reward == 1.0 and rollout.trainable for rollout in rollouts)
    status = client.status(batch_id)
    assert (status.n_completed, status.n_finished, status.mean_reward, status.failures) == (60, 60, 1.0, {})
    (init, run, score) = client.timings(rollouts[0].rollout_id)
    assert [init.stage, run.stage, score.stage] == list(farm.Stage)
    assert len({init.node, run.node, score.node}) == 1, "later stages run where the sandbox is"


def test_tokens_of_the_policy_are_returned(client: farm.Farm) -> None:
    instance = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}
    batch_id = client.submit({"instances": [instance] * 4, "n_samples": 2, "sampling": {"seed": 3}})
    arrays: Arrays = client.rows(batch_id, whole_groups=True, timeout_s=600)
    assert len(arrays) == 8
    assert set(arrays.rewards.tolist()) <= {0.0, 1.0}
    assert arrays.response_mask.sum() > 0
    assert (arrays.response_logprobs[arrays.response_mask == 1] < 0).all()
    assert (arrays.policy_versions[arrays.response_mask == 1] == 0).all()
    (call,) = client.calls(f"{batch_id}.0.0")
    assert call.token_exact
    assert call.messages[-1]["content"] == QUESTION


@pytest.mark.parametrize(
    ("more", "trains"),
    [
        ({"row_builder": "per_call"}, True),
        ({"train_calls": {"last": 1}}, True),
        ({"train_calls": {"labels": {"model": "small"}}}, False),
    ],
)
def test_batch_options_select_the_calls_that_train(client: farm.Farm, more: dict[str, Any], trains: bool) -> None:
    instance = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}
    batch_id = client.submit({"instances": [instance], "n_samples": 2, **more})
    rollouts = client.collect(batch_id, timeout_s=600)
    assert [len(each.segments) for each in rollouts] == [1, 1]
    assert [segment.trainable for each in rollouts for segment in each.segments] == [trains] * 2
    (call,) = client.calls(f"{batch_id}.0.0")
    assert call.labels == ({} if trains else {"trains": "no"})


def test_evaluator_sets_rewards_of_turns_and_rows(client: farm.Farm) -> None:
    fields = {"question": QUESTION, "expected": "three", "call_reward": 0.25}
    batch_id = client.submit({"instances": [{"data_source": "chat", "fields": fields}]})
    for _ in range(2):
        (rollout,) = client.collect(batch_id, timeout_s=600)
        (segment,) = rollout.segments
        assert rollout.reward in (0.0, 1.0)
        assert segment.reward == 0.25
        assert segment.turn_rewards == ((len(segment.response_ids) - 1, 0.25),)
        arrays: Arrays = client.rows(batch_id)
        assert (arrays.rewards.tolist(), arrays.row_rewards.tolist()) == ([rollout.reward], [0.25])
        client.rescore(batch_id)


def test_steps_of_a_training_run_are_collected(client: farm.Farm) -> None:
    fields = {"question": QUESTION, "expected": "three"}
    problems = [{"data_source": "chat", "instance_id": f"hops-{i}", "fields": fields} for i in range(50)]

    def collector() -> StepCollector:
        options = CollectingOptions(2, max_inflight_groups=3, leftovers="carry_over", max_staleness=1)
        return StepCollector(client, "hops", ShuffledInstances(problems), options, {"n_samples": 4})

    with Producer(first := collector()):
        steps = [first.collect(number, timeout_s=600) for number in (1, 2)]
    for step in steps:
        for group in step.groups:
            assert {rollout.reward for rollout in group.rollouts} == {0.0, 1.0}
    ids = [group.group_id for step in steps for group in step.groups]
    assert len(set(ids)) == 4
    again = collector()
    assert [group.group_id for number in (1, 2) for group in again.collect(number).groups] == ids
    names = {group.rollouts[0].instance_id for group in steps[0].groups}
    assert {rate.instance_id for rate in client.runs.solve_rates("hops", "chat", list(names))} == names
    report = evaluate(client, problems[:2], n_samples=4, name="hops", timeout_s=600)
    assert report.sources["chat"].average is not None
    assert report.sources["chat"].average.n == 2
    for batch in client.runs.keyed_batches([f"hops:wave-{number}" for number in range(100)]):
        client.cancel(batch.batch_id)
        assert client.violations(batch.batch_id) == []


def test_collector_seeds_differ_between_waves_and_repeat_with_the_seed(client: farm.Farm) -> None:
    problem = {"data_source": "chat", "instance_id": "one", "fields": {"question": QUESTION, "expected": "three"}}
    request = {"n_samples": 2, "sampling": {"seed": 7}}

    def seeds(run: str) -> list[list[int]]:
        options = CollectingOptions(1, gen_batch_size=1, filter_groups="keep")
        collector = StepCollector(client, run, ShuffledInstances([problem]), options, request)
        steps = [collector.collect(number, timeout_s=600) for number in (1, 2, 3)]
        rollouts = [rollout for step in steps for group in step.groups for rollout in group.rollouts]
        return [[call.sampling["seed"] for call in client.calls(each.rollout_id)] for each in rollouts]

    drawn = seeds("drawn")
    assert len({seed for calls in drawn for seed in calls}) == 6, "the same problem, at the same place of its wave"
    assert seeds("drawn") == drawn
    assert seeds("drawn-again") == drawn, "the seed and the wave decide, and not the name of the run"


def test_stream_continues_from_a_cursor(client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [NOOP] * 10, "n_samples": 2})
    first = []
    for rollout in client.stream(batch_id, timeout_s=600):
        first.append(rollout)
        if len(first) == 7:
            break
    rest = list(client.stream(batch_id, cursor=first[-1].cursor, timeout_s=600))
    assert len({rollout.rollout_id for rollout in first + rest}) == 20 == len(first + rest)
    groups = list(client.stream_groups(batch_id, timeout_s=600))
    assert sorted(group.group_id for group in groups) == sorted(f"{batch_id}.{g}" for g in range(10))
    assert all(len(group.rollouts) == 2 for group in groups)
    assert len(list(client.stream_groups(batch_id, cursor=groups[5].cursor))) == 4


def test_invalid_instance_is_refused_by_its_field_and_nothing_starts(client: farm.Farm) -> None:
    before = client.recent(1000)
    with pytest.raises(InvalidRequest, match=r"^instances\[1\]\.fields\.seconds: ") as caught:
        client.submit({"instances": [NOOP, noop(seconds=-1)]})
    assert caught.value.field == "instances[1].fields.seconds"
    with pytest.raises(UnknownHandler, match="juggling"):
        client.submit({"instances": [NOOP, {"data_source": "juggling", "fields": {}}]})
    with pytest.raises(InvalidRequest, match="n_samples"):
        client.submit({"instances": [NOOP], "n_samples": 0})
    with pytest.raises(InvalidRequest, match="n_sample: Extra inputs"):
        client.submit({"instances": [NOOP], "n_sample": 1})
    assert client.recent(1000) == before


def test_same_idempotency_key_returns_the_same_batch(client: farm.Farm) -> None:
    request = {"instances": [NOOP], "idempotency_key": "step-7"}
    assert client.submit(request) == client.submit(request)
    with pytest.raises(Conflict, match="step-7"):
        client.submit(request | {"n_samples": 2})


def test_restarted_trainer_runs_a_step_once(client: farm.Farm) -> None:
    name = f"run-{client.submit({'instances': [NOOP]})}"
    right, other = farm.Instance(**noop()), farm.Instance(**noop(seconds=0.01))
    listed = [right, other, right, other]
    run = TrainerRun(client, name, {"max_attempts": 2}, timeout_s=600)
    first = run.run_samples(listed, 7)
    assert [(each.group_index, each.sample_index) for each in first] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    again = TrainerRun(client, name, {"max_attempts": 2}, timeout_s=600)
    assert [each.rollout_id for each in again.run_samples(listed, 7)] == [each.rollout_id for each in first]
    batches = {each.batch_id for each in first}
    assert {each.batch_id for each in again.run_samples(listed, 7)} != batches, (
        "the same once more, in one step, is more"
    )
    assert {each.batch_id for each in run.run_samples(listed, 8)} != batches
    assert {each.batch_id for each in run.run_samples(listed, 8, "eval")} != batches


KINDS = ("sandbox_error", "engine_error", "evaluator_error", "agent_error", "handler_error")


def test_infrastructure_errors_are_retried_and_never_scored(client: farm.Farm) -> None:
    each = [(stage, kind) for stage in ("init", "run", "eval") for kind in KINDS]
    broken = [noop(fail=f"{stage}:{kind}") for stage, kind in each]
    batch_id = client.submit({"instances": [NOOP, *broken], "max_attempts": 2})
    fine, *rollouts = client.collect(batch_id, timeout_s=600)
    assert fine.reward == 1.0
    for (stage, kind), rollout in zip(each, rollouts, strict=True):
        assert (rollout.state, rollout.outcome, rollout.reward, rollout.trainable) == ("failed", kind, None, False)
        assert rollout.failure is not None
        assert rollout.rollout_id in rollout.failure.message or kind in rollout.failure.message
        assert [timing.attempt for timing in client.timings(rollout.rollout_id) if timing.stage == stage] == [1, 2]
    status = client.status(batch_id)
    assert (status.failures, status.mean_reward) == (dict.fromkeys(KINDS, 3), 1.0)


def test_error_in_a_plugin_is_named(client: farm.Farm) -> None:
    (rollout,) = client.collect(client.submit({"instances": [noop(fail="run:bug")], "max_attempts": 1}), timeout_s=600)
    assert rollout.failure is not None
    assert rollout.rollout_id in rollout.failure.message
    assert "RuntimeError" in rollout.failure.message


def test_final_error_is_not_retried(client: farm.Farm) -> None:
    (rollout,) = client.collect(client.submit({"instances": [noop(fail="run:final")]}), timeout_s=600)
    assert (rollout.outcome, rollout.attempt) == ("handler_error", 1)


def test_deadline_is_a_scored_outcome(client: farm.Farm) -> None:
    request = {"instances": [noop(seconds=60)], "limits": {"run_s": 0.2}}
    (rollout,) = client.collect(client.submit(request), timeout_s=600)
    assert (rollout.outcome, rollout.reward, rollout.trainable) == ("deadline", 1.0, True)


def test_cancel_ends_a_batch_at_once_and_is_idempotent(client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [noop(seconds=300)] * 30})
    for status in iter(lambda: client.status(batch_id), None):
        if status.stages[farm.Stage.RUN][farm.State.ACTIVE] == 16:
            break
    assert client.cancel(batch_id, [f"{batch_id}.0.0"]) == [f"{batch_id}.0.0"]
    assert len(client.cancel(batch_id)) == 29
    assert client.cancel(batch_id) == []
    assert client.wait(batch_id, 120).n_cancelled == 30
    # the slots are free again: nothing still sleeps
    assert client.wait(client.submit({"instances": [NOOP] * 40}), 200).n_completed == 40


def test_rescore_repeats_only_the_evaluation(client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [NOOP] * 2})
    client.wait(batch_id, 600)
    assert len(client.rescore(batch_id)) == 2
    client.wait(batch_id, 600)
    assert len(client.rewards(f"{batch_id}.0.0")) == 2
    assert [timing.stage for timing in client.timings(f"{batch_id}.0.0")] == ["init", "run", "eval", "eval"]


def test_unknown_ids_are_not_found(client: farm.Farm) -> None:
    for ask in (client.status, client.collect, client.cancel, client.rescore, client.rollouts, client.rollout):
        with pytest.raises(NotFound, match="nope"):
            ask("nope")
    with pytest.raises(NotFound, match="nope"):
        next(client.stream("nope"))


def test_waiting_times_out(client: farm.Farm) -> None:
    batch_id = client.submit({"instances": [noop(seconds=300)]})
    with pytest.raises(TimeoutError, match="0 of 1"):
        client.collect(batch_id, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="nothing ended"):
        next(client.stream(batch_id, timeout_s=0.1))
    client.cancel(batch_id)


def test_batch_completes_without_notifications(here: Embedded) -> None:
    with farm.connect(here.store_url, broker_url="redis+socket:///nowhere/redis.sock") as deaf:
        assert deaf.wait(deaf.submit({"instances": [NOOP]}), 600).n_completed == 1


def test_stopped_farm_leaves_no_files_and_keeps_its_batches(tmp_path: Any) -> None:
    with farm_folder() as folder:
        with pytest.raises(FarmUnreachable, match="farm up"):
            farm.connect(folder / "home")
        with embedded(folder) as here, farm.connect(here.home) as client:
            with pytest.raises(Conflict, match="already"), embedded(folder):
                pass
            batch_id = client.submit({"instances": [NOOP] * 3})
            client.wait(batch_id, 600)
            unfinished = client.submit({"instances": [noop(seconds=300)]})
        assert left_of(folder) == []
        with farm.connect(folder / "home") as client:
            assert len(client.collect(batch_id, timeout_s=0)) == 3
            assert client.status(unfinished).n_finished == 0
        with embedded(folder) as here, farm.connect(here.home) as client:
            client.cancel(unfinished)
            assert client.wait(unfinished, 30).n_cancelled == 1
