"""Lengths of samples: of whole ones by their count, of cancelled ones by their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from farm.adapters.conformance.constructed_rollouts import every_kind
from farm.collecting.sample_lengths import Lengths
from farm.records.rollout import Group
from farm.records.trajectory import Segment, token_ids


def row(*mask: int) -> Segment:
    n = len(mask)
    ids = token_ids(range(n))
    return Segment(token_ids([1]), ids, np.array(mask, np.uint8), np.zeros(n, np.float32), token_ids([0] * n))


def group(*members: tuple[int, tuple[Segment, ...]]) -> Group:
    first = every_kind()[0]
    return Group("b.0", tuple(replace(first, n_response_tokens=n, segments=rows) for n, rows in members))


def test_a_cancelled_sample_counts_as_far_as_it_came() -> None:
    whole, cut, never = (5, (row(1, 1, 1, 1, 1),)), (0, (row(1, 0, 1), row(1))), (0, ())
    assert Lengths.of([group(whole, cut, never), group(never)]) == Lengths(2, 8, 1, 5)
    assert Lengths.of([]) == Lengths()
    assert Lengths().mean_tokens == Lengths().mean_longest_tokens == 0.0


def test_lengths_add_up() -> None:
    some, more = Lengths.of([group((5, ()), (3, ()))]), Lengths.of([group((10, ()))])
    both = some + more
    assert (both.mean_tokens, both.mean_longest_tokens) == (6.0, 7.5)
    assert Lengths(*both.record()) == both
