"""Builders of training rows by name: entry points of `farm.row_builders`, functions from model calls to segments.

A builder gets only the calls that train, in order. Its rows are checked against the calls before they are stored: a
plug-in's may omit sampled tokens, but may not hold tokens that were not sampled in this way.
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
"""The builders that omit no sampled token."""


def chosen_calls(rule: TrainCalls, calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that train, in order; calls of models other than the policy never do."""
    taken = [call for call in calls if ROLE not in call.labels and _takes(rule, call.labels)]
    return taken if rule.last is None else taken[-rule.last :]


def _takes(rule: TrainCalls, labels: Mapping[str, str]) -> bool:
    wanted = all(name in labels and fnmatchcase(labels[name], each) for name, each in rule.labels.items())
    return wanted and not any(fnmatchcase(labels.get(name, ""), each) for name, each in rule.without.items())


def build_rows(name: str, trained: Sequence[ModelCall], calls: Sequence[ModelCall]) -> tuple[Segment, ...]:
    """Return the checked training rows of a rollout, built from those of its `calls` that train.

    If none train, returns the first row of all calls with mask 0, so that adapters have a row for each rollout.
    Raises ValueError or TypeError for rows that do not match the calls, NotFound, and the errors of a plug-in.
    """
    rows = tuple(plugins.load(GROUP, name)(trained))
    if not all(isinstance(row, Segment) for row in rows):
        raise TypeError("its rows must be segments")
    check(rows, trained, whole=name in WHOLE)
    return rows or tuple(row.masked() for row in segments(calls)[:1])
