"""Samplers: epochs, states that are JSON, mixing by weight, and data that changed since the run began."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farm.collecting import Mixture, ShuffledInstances
from farm.errors import InvalidRequest


def problems(n: int, source: str = "math", **values: Any) -> list[dict[str, Any]]:
    return [{"data_source": source, "instance_id": f"{source}-{i}", "fields": {"i": i}, **values} for i in range(n)]


def names(drawn: Any) -> list[str]:
    return [instance.instance_id for instance in drawn]


def test_epoch_has_each_instance_once_and_the_next_another_order() -> None:
    sampler = ShuffledInstances(problems(10), seed=3)
    drawn, state = sampler.draw(25, {})
    first, second, third = names(drawn[:10]), names(drawn[10:20]), names(drawn[20:])
    assert sorted(first) == sorted(second) == sorted(f"math-{i}" for i in range(10))
    assert first != second
    assert third == names(sampler.draw(30, {})[0])[20:25]
    assert state["drawn"] == 25


def test_state_continues_in_another_process() -> None:
    sampler = ShuffledInstances(problems(7), seed=1)
    whole = names(sampler.draw(12, {})[0])
    some, state = sampler.draw(5, {})
    again = ShuffledInstances(problems(7), seed=1)
    rest, _ = again.draw(7, json.loads(json.dumps(state)))
    assert names(some) + names(rest) == whole


def test_sequential_sampler_keeps_the_given_order() -> None:
    drawn, _ = ShuffledInstances(problems(3), shuffle=False).draw(4, {})
    assert names(drawn) == ["math-0", "math-1", "math-2", "math-0"]


def test_instance_without_a_name_is_named_by_its_contents() -> None:
    one = ShuffledInstances([{"data_source": "math", "fields": {"a": 1, "b": 2}}]).draw(1, {})[0][0]
    same = ShuffledInstances([{"data_source": "math", "fields": {"b": 2, "a": 1}}]).draw(1, {})[0][0]
    other = ShuffledInstances([{"data_source": "math", "fields": {"a": 1, "b": 3}}]).draw(1, {})[0][0]
    assert one.instance_id
    assert one.instance_id == same.instance_id != other.instance_id


@pytest.mark.parametrize(
    ("instances", "field"),
    [
        ([], "instances"),
        ([{"data_source": "math"}], "instances[0].fields"),
        (
            [*problems(2), {"data_source": "math", "instance_id": "math-1", "fields": {"i": 9}}],
            "instances[2].instance_id",
        ),
    ],
)
def test_bad_data_is_named(instances: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        ShuffledInstances(instances)
    assert error.value.field == field


def test_data_that_changed_since_the_run_began_is_refused() -> None:
    _, state = ShuffledInstances(problems(4)).draw(2, {})
    for other in (
        ShuffledInstances(problems(5)),
        ShuffledInstances(problems(4), seed=1),
        Mixture({"math": ShuffledInstances(problems(4))}, {"math": 1}),
    ):
        with pytest.raises(InvalidRequest, match="sampler"):
            other.draw(1, state)


def mixture(**weights: float) -> Mixture:
    samplers = {name: ShuffledInstances(problems(5, name), shuffle=False) for name in weights}
    return Mixture(samplers, weights)


def test_sources_are_mixed_by_weight_and_evenly() -> None:
    # credit of a and b after each draw: (-.25 .25) (-.5 .5) (.25 -.25) (0 0), then repeated
    drawn, state = mixture(a=3, b=1).draw(8, {})
    assert names(drawn) == ["a-0", "a-1", "b-0", "a-2", "a-3", "a-4", "b-1", "a-0"]
    assert state["credit"] == {"a": 0.0, "b": 0.0}


def test_state_of_a_mixture_continues() -> None:
    whole = names(mixture(a=0.5, b=0.3, c=0.2).draw(20, {})[0])
    drawn: list[str] = []
    state: dict[str, Any] = {}
    for n in (1, 2, 3, 5, 9):
        some, state = mixture(a=0.5, b=0.3, c=0.2).draw(n, json.loads(json.dumps(state)))
        drawn += names(some)
    assert drawn == whole
    assert [sum(name.startswith(source) for name in whole) for source in "abc"] == [10, 6, 4]


def test_changed_weights_apply_from_the_next_draw() -> None:
    _, state = mixture(a=1, b=1).draw(10, {})
    drawn, _ = mixture(a=1, b=4).draw(10, state)
    assert sum(name.startswith("b") for name in names(drawn)) == 8


@pytest.mark.parametrize(
    ("weights", "field"),
    [({"a": 0.0}, "weights['a']"), ({"a": float("inf")}, "weights['a']"), ({"b": 1.0}, "weights"), ({}, "weights")],
)
def test_bad_weights_are_named(weights: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Mixture({"a": ShuffledInstances(problems(2, "a"))}, weights)
    assert error.value.field == field
