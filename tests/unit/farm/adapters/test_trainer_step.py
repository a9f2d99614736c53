"""Samples as trainers list them, the order of returned rollouts, and instances in the rows of a data set."""

from __future__ import annotations

import json

import pytest

from farm.adapters.conformance.adapter_promises import rollout
from farm.adapters.trainer_step import StepSamples, TrainerRun, check_count, check_engines, groups_of, instance_of
from farm.errors import InvalidRequest
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineState, StoredEngine, serves
from farm.records.request import Instance


def problem(name: str) -> Instance:
    return Instance(data_source="noop", fields={"name": name})


A, B, C = problem("a"), problem("b"), problem("c")


def test_repeats_are_samples_of_one_instance() -> None:
    samples = StepSamples.of([A, A, B, B, C, C])
    assert (samples.instances, samples.n_samples) == ((A, B, C), 2)
    assert samples.positions == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))


def test_interleaved_repeats_are_returned_in_listed_order() -> None:
    samples = StepSamples.of([A, B, A, B])
    rollouts = [rollout(number, []) for number in range(4)]
    back = samples.in_order(groups_of(rollouts, 2))
    assert [(each.group_index, each.sample_index) for each in back] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_problem_that_is_drawn_twice_is_two_groups() -> None:
    samples = StepSamples.of([A, A, B, B, problem("a"), problem("a")])
    assert (samples.instances, samples.n_samples) == ((A, B, A), 2)
    assert samples.positions[4:] == ((2, 0), (2, 1))


def test_uneven_repeats_become_smaller_groups() -> None:
    samples = StepSamples.of([A, A, A, A, B, B])
    assert (samples.instances, samples.n_samples) == ((A, A, B), 2)
    assert StepSamples.of([A, A, A, B, B]).n_samples == 1
    with pytest.raises(InvalidRequest, match="no samples"):
        StepSamples.of([])


@pytest.mark.parametrize("as_json", [False, True])
def test_instance_is_read_from_a_column(as_json: bool) -> None:
    value = {"data_source": "noop", "fields": {"name": "a"}}
    assert instance_of({"prompt": "x", "farm_instance": json.dumps(value) if as_json else value}) == A
    assert instance_of({"farm_instance": A}) is A


def test_row_without_an_instance_is_refused_by_column_and_field() -> None:
    with pytest.raises(InvalidRequest, match=r"no column 'farm_instance'; it has: label, prompt"):
        instance_of({"prompt": "x", "label": "y"})
    with pytest.raises(InvalidRequest, match=r"^farm_instance\.fields: "):
        instance_of({"farm_instance": {"data_source": "noop"}})
    with pytest.raises(InvalidRequest, match=r"^farm_instance: it is not JSON"):
        instance_of({"farm_instance": "{"})


def test_settings_may_not_contain_fields_of_the_step() -> None:
    with pytest.raises(InvalidRequest, match="n_samples"):
        TrainerRun(None, "run", {"n_samples": 4})  # type: ignore[arg-type]


def test_request_is_counted_in_its_step_even_if_steps_overlap() -> None:
    run = TrainerRun(None, "run")  # type: ignore[arg-type]
    assert [run._repeat(step, "key") for step in (4, 5, 4, 5, 4)] == [0, 0, 1, 1, 2]
    assert run._repeat(500, "key") == 0
    assert [*run._n_requests] == [500]


def test_experts_are_refused_if_the_trainer_has_no_field_for_them() -> None:
    run = TrainerRun(None, "run", {"sampling": {"routed_experts": 8}}, takes_experts=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no field for them") as caught:
        run.submit([Instance(data_source="noop", fields={})], 0)
    assert caught.value.field == "sampling.routed_experts"


def test_images_are_refused_if_the_trainer_has_no_field_for_them() -> None:
    run = TrainerRun(None, "run", {"agent_requests": {"images": "engine"}})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no place for images") as caught:
        run.submit([Instance(data_source="noop", fields={})], 0)
    assert caught.value.field == "agent_requests.images"


def engine(url: str, model: str, *, token_out: bool = True, tokenizer: str = "") -> EngineState:
    info = EngineInfo(model=model, token_out=token_out, notes=("it is old",))
    return EngineState(StoredEngine(url=url, model=model, tokenizer=tokenizer, info=info), 0, 0)


def test_engines_without_ids_or_with_two_tokenizers_are_refused() -> None:
    check_engines([engine("http://a/v1", "m"), engine("http://b/v1", "m")])
    check_engines([engine("http://a/v1", "m", tokenizer="t"), engine("http://b/v1", "n", tokenizer="t")])
    check_engines([engine("http://a/v1", "m"), engine("http://b/v1", "n", token_out=False)], "m")
    check_engines([EngineState(StoredEngine(url="http://new/v1"), 0, 0)])
    with pytest.raises(InvalidRequest, match=r"http://b/v1 returns no token ids .*it is old") as caught:
        check_engines([engine("http://a/v1", "m"), engine("http://b/v1", "m", token_out=False)])
    assert caught.value.field == "model"
    with pytest.raises(InvalidRequest, match=r"several tokenizers: m at http://a/v1, n at http://b/v1"):
        check_engines([engine("http://a/v1", "m"), engine("http://b/v1", "n")])


def test_training_run_checks_only_its_own_engines() -> None:
    shared, own = engine("http://a/v1", "m"), engine("http://b/v1", "run:exp-1", token_out=False)
    check_engines([shared, own])
    check_engines([shared, own], "m")
    with pytest.raises(InvalidRequest, match=r"http://b/v1 returns no token ids"):
        check_engines([shared, own], "run:exp-1")


@pytest.mark.parametrize(
    ("engine_model", "model", "expected"),
    [
        ("", "", True),
        ("m", "", True),
        ("", "m", True),
        ("m", "m", True),
        ("m", "n", False),
        ("run:a", "", False),
        ("run:a", "m", False),
        ("run:a", "run:a", True),
        ("run:a", "run:ab", False),
        ("run:ab", "run:a", False),
        ("", "run:a", False),
        ("m", "run:a", False),
        ("run:", "", False),
        ("runs", "", True),
    ],
)
def test_engine_serves_batches_of_its_model(engine_model: str, model: str, expected: bool) -> None:
    assert serves(engine_model, model) is expected


def test_number_of_rollouts_must_equal_the_number_of_samples() -> None:
    check_count(4, 4)
    with pytest.raises(InvalidRequest, match="listed 5 samples, but there are 4 rollouts"):
        check_count(4, 5)
