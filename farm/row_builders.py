"""The makers of training rows by name: entry points of `farm.row_builders`, functions from model calls to segments.

They are given the calls that train alone, in their order. Whatever makes the rows, each is checked against the calls
before it is stored: that of a plug-in may leave sampled tokens out, but hold none that was not sampled so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from farm import plugins
from farm.records.request import TrainCalls
from farm.records.token_audit import check
from farm.records.trajectory import ROLE, ModelCall, Segment, segments

GROUP = "farm.row_builders"
RowBuilder: TypeAlias = Callable[[Sequence[ModelCall]], Sequence[Segment]]
WHOLE = frozenset({"prefix", "per_call"})
"""The builders that leave out nothing that was sampled."""


def chosen_calls(rule: TrainCalls, calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that train, in their order; those of other models than the policy never do."""
    taken = [call for call in calls if ROLE not in call.labels and _takes(rule, call.labels)]
    return taken if rule.last is None else taken[-rule.last :]


def _takes(rule: TrainCalls, labels: Mapping[str, str]) -> bool:
    wanted = all(name in labels and fnmatchcase(labels[name], each) for name, each in rule.labels.items())
    return wanted and not any(fnmatchcase(labels.get(name, ""), each) for name, each in rule.without.items())


def build_rows(name: str, trained: Sequence[ModelCall], played: Sequence[ModelCall]) -> tuple[Segment, ...]:
    """Return the checked training rows of a rollout, made of those of its `played` calls that train.

    Where none do, the first row of all is there with mask 0: adapters have a row of the rollout, and none to train on.
    Raises ValueError or TypeError for rows that are not of the calls, NotFound, and whatever a plug-in raises.
    """
    rows = tuple(plugins.load(GROUP, name)(trained))
    if not all(isinstance(row, Segment) for row in rows):
        raise TypeError("its rows must be segments")
    check(rows, trained, whole=name in WHOLE)
    return rows or tuple(row.masked() for row in segments(played)[:1])
