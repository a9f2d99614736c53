"""The experts of a training row, as references to those of its rollout's calls.

The experts of a token depend on all tokens up to it. So a call's experts at a position are the row's where both have
the same ids up to there. Of several such calls, the first counts that ran the token in the row's own history: for a
sampled token that is the call that sampled it, or the next one, which had the call's last token as its first new input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from farm.records.experts.routed_experts import ExpertIds, RowExperts
from farm.records.trajectory import ModelCall, Segment, TokenIds

_NONE = -1


@dataclass(frozen=True, slots=True)
class ExpertStretch:
    """The positions [begin, end) of a row have the experts recorded for call `call`, from index `at` on."""

    begin: int
    end: int
    call: int
    at: int


def stretches_of(row: Segment, calls: Sequence[ModelCall]) -> tuple[ExpertStretch, ...]:
    """Return the stretches of a row with experts in its rollout's calls, in order; none if no call has any."""
    if all(call.routed_experts is None for call in calls):
        return ()
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    owner = np.full(len(ids), _NONE, np.int64)
    starts: dict[int, int] = {}
    of_others: list[tuple[int, slice]] = []
    of_its_own: list[tuple[int, slice]] = []
    for call in calls:
        if call.routed_experts is None or call.prompt_ids is None or call.response_ids is None:
            continue
        whole = np.concatenate([call.prompt_ids, call.response_ids])
        n = _n_common(ids, whole)
        starts[call.index] = call.routed_experts.start
        stretch = (call.index, slice(call.routed_experts.start, min(call.routed_experts.end, n)))
        (of_its_own if n == len(whole) else of_others).append(stretch)
    # stretches that take precedence come last
    for index, taken in (*reversed(of_others), *reversed(of_its_own)):
        owner[taken] = index
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return tuple(
        ExpertStretch(begin, end, index, begin - starts[index])
        for begin, end in pairwise(edges)
        if begin < end and (index := int(owner[begin])) != _NONE
    )


def _n_common(one: TokenIds, other: TokenIds) -> int:
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if len(different) else n


def assembled(
    n_tokens: int, stretches: Sequence[ExpertStretch], of_calls: Mapping[int, ExpertIds]
) -> RowExperts | None:
    """Return the experts of a row of `n_tokens` from those of its calls; None if no call has any.

    The stretch of a call without experts, or with those of another model, stays unknown.
    """
    pairs = [(each, of_calls[each.call]) for each in stretches if each.call in of_calls]
    if not pairs:
        return None
    n_layers, top_k = pairs[0][1].shape[1:]
    pairs = [(each, of_call) for each, of_call in pairs if of_call.shape[1:] == (n_layers, top_k)]
    ids = np.zeros((n_tokens, n_layers, top_k), np.result_type(*(of_call.dtype for _, of_call in pairs)))
    known = np.zeros(n_tokens, np.uint8)
    for stretch, of_call in pairs:
        taken = slice(stretch.begin, stretch.end)
        ids[taken] = of_call[stretch.at : stretch.at + stretch.end - stretch.begin]
        known[taken] = 1
    return RowExperts(ids.reshape(-1), n_layers, top_k, known)
