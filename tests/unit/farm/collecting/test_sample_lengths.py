"""Lengths of samples: finished ones by their tokens, stopped ones by their tokens so far."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from farm.adapters.conformance.adapter_promises import every_kind
from farm.collecting.waves import Lengths
from farm.records.rollout import Group, Outcome, Rollout, State
from farm.records.trajectory import Segment, token_ids


def row(*mask: int) -> Segment:
    n = len(mask)
    ids = token_ids(range(n))
    return Segment(token_ids([1]), ids, np.array(mask, np.uint8), np.zeros(n, np.float32), token_ids([0] * n))


def sample(name: str, n_tokens: int, **changed: object) -> Rollout:
    values = {"rollout_id": name, "n_response_tokens": n_tokens, "segments": (row(1),), "reward": 1.0}
    values |= {"state": State.COMPLETED, "outcome": Outcome.ANSWERED}
    return replace(every_kind()[0], **{**values, **changed})  # type: ignore[arg-type]


def stopped(name: str, n_tokens: int, **changed: object) -> Rollout:
    rows = (row(*[1] * n_tokens, 0),) if n_tokens else ()
    return sample(name, 0, **{"segments": rows, "reward": None, "state": State.CANCELLED, "outcome": None, **changed})


def test_trained_lengths_are_counted_by_sample() -> None:
    groups = [Group("b.0", (sample("a", 5), sample("b", 3), stopped("c", 9))), Group("b.1", (sample("d", 10),))]
    trained = Lengths.of_trained(groups)
    assert (trained.n_samples, trained.mean_tokens, trained.mean_longest_tokens) == (3, 6.0, 7.5)
    assert Lengths(*trained.record()) == trained
    broken = sample("x", 99, reward=None, state=State.FAILED, outcome=Outcome.SANDBOX_ERROR)
    assert Lengths.of_trained([Group("b.2", (broken,))]).n_samples == 0
    assert Lengths().mean_tokens == Lengths().mean_longest_tokens == 0.0


def test_stopped_samples_count_by_tokens_only() -> None:
    stale = stopped("c", 7, state=State.FAILED, outcome=Outcome.STALE)
    requested = Lengths.of_requested([Group("b.0", (sample("a", 5), sample("b", 3), stale, stopped("d", 0)))])
    assert (requested.n_samples, requested.n_tokens, requested.mean_longest_tokens) == (2, 15, 7.0)
    # a kept sample counts in the group in which it trains
    kept = Lengths.of_requested([Group("b.0", (sample("a", 9), sample("b", 3), stopped("c", 7)))], kept=["a"])
    assert (kept.n_samples, kept.n_tokens, kept.n_longest) == (1, 10, 9)


def test_stopping_long_samples_does_not_change_the_requested_mean() -> None:
    drawn = random.Random(7)
    lengths = [1 + int(drawn.expovariate(1 / 200)) for _ in range(1500)]
    samples = [sample(str(i), n) if n <= 150 else stopped(str(i), 150) for i, n in enumerate(lengths)]
    group = Group("b.0", tuple(samples))
    true = sum(lengths) / len(lengths)
    assert Lengths.of_trained([group]).mean_tokens < 0.4 * true
    assert abs(Lengths.of_requested([group]).mean_tokens / true - 1) < 0.1
