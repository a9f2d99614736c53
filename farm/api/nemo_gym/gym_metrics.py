"""`/aggregate_metrics`: mean, maximum, minimum, median and deviation of each number in results of `/run`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict

from farm.records.request_values import Request

Result = Mapping[str, Any]
_GREATEST = 1e100
"""Larger numbers are ignored: their squares overflow 64 bits."""
_TASK, _REPEAT = "_ng_task_index", "_ng_rollout_index"


class AggregateRequest(Request):
    """Results of `/run`; other settings of a collector are ignored."""

    model_config = ConfigDict(extra="ignore")

    verify_responses: list[dict[str, Any]]


def aggregate(results: Sequence[Result]) -> dict[str, Any]:
    """Return the metrics over all results, over those of each task, and over those of each repeat.

    Masked results and failures have no valid reward: they count in the coverage, but in no mean.
    """
    measured = [result for result in results if _is_measured(result)]
    overall = _statistics(measured)
    missed = len(results) - len(measured)
    coverage: dict[str, Any] = {}
    if missed:
        tasks = {_index(result, _TASK) for result in measured}
        n_tasks = len({_index(result, _TASK) for result in results})
        coverage = {
            "coverage/measured_rollouts": len(measured),
            "coverage/masked_rollouts": missed,
            "coverage/measured_tasks": len(tasks),
            "coverage/fully_masked_tasks": n_tasks - len(tasks),
        }
    agent = overall | coverage
    if measured:
        agent["num_repeats"] = len({_index(result, _REPEAT) for result in results})
    return {
        "agent_metrics": agent,
        "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")} | coverage,
        "group_level_metrics": _by(measured, _TASK),
        "repeat_level_metrics": _by(measured, _REPEAT),
    }


def _is_measured(result: Result) -> bool:
    return not result.get("mask_sample") and _is_number(result.get("reward"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _GREATEST


def _index(result: Result, name: str) -> int:
    value = result.get(name, 0)
    return value if isinstance(value, int) else 0


def _usage(result: Result) -> Mapping[str, Any]:
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


def _by(results: Iterable[Result], name: str) -> list[dict[str, Any]]:
    groups: defaultdict[int, list[Result]] = defaultdict(list)
    for result in results:
        groups[_index(result, name)].append(result)
    return [{**_statistics(groups[index]), name: index} for index in sorted(groups)]


_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}


def _statistics(results: Sequence[Result]) -> dict[str, float]:
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in {**result, **_usage(result)}.items():
            if _is_number(value) and not name.startswith("_ng_") and name != "mask_sample":
                numbers[name].append(float(value))
    return {
        f"{statistic}/{name}": of(values) for name, values in numbers.items() for statistic, of in _STATISTICS.items()
    }
