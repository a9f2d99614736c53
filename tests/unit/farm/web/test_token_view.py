"""Tokens in ranges: each once, in order, with one kind and one weight version per range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from farm.records.trajectory import Segment, token_ids
from farm.web.rollout_views import MOST, token_row


def segment(prompt: list[int], mask: list[int], versions: list[int] | None = None) -> Segment:
    n = len(mask)
    return Segment(
        token_ids(prompt),
        token_ids(list(range(100, 100 + n))),
        np.asarray(mask, np.uint8),
        np.asarray([-0.1 * (at + 1) if sampled else 0.0 for at, sampled in enumerate(mask)], np.float32),
        token_ids([version if sampled else -1 for version, sampled in zip(versions or [3] * n, mask, strict=True)]),
    )


def test_ranges_change_with_mask_and_version() -> None:
    row = token_row(0, segment([1, 2], [1, 1, 0, 1, 1], [3, 3, 3, 3, 4]))
    assert [(each.kind, each.version, [token.position for token in each.tokens]) for each in row.stretches] == [
        ("prompt", None, [0, 1]),
        ("sampled", 3, [2, 3]),
        ("observed", None, [4]),
        ("sampled", 3, [5]),
        ("sampled", 4, [6]),
    ]
    assert (row.n_prompt, row.n_response, row.n_sampled, row.versions) == (2, 5, 4, [3, 4])
    assert row.mean_logprob is not None
    assert abs(row.mean_logprob - (-0.1 - 0.2 - 0.4 - 0.5) / 4) < 1e-6


def test_less_likely_tokens_have_darker_levels() -> None:
    values = [-0.01, -0.2, -1.0, -2.0, -9.0]
    made = segment([1], [1] * 5)
    made.response_logprobs[:] = values
    (_, sampled) = token_row(0, made).stretches
    assert [token.level for token in sampled.tokens] == [0, 1, 2, 3, 4]


@given(some.lists(some.integers(0, 9), max_size=30), some.lists(some.integers(0, 1), max_size=60))
def test_every_token_is_shown_once(prompt: list[int], mask: list[int]) -> None:
    made = segment(prompt, mask)
    shown = [token.token_id for each in token_row(0, made).stretches for token in each.tokens]
    assert shown == [*prompt, *made.response_ids.tolist()]


def test_long_row_is_shown_in_part() -> None:
    row = token_row(0, segment([], [1] * (MOST + 500)))
    assert sum(len(each.tokens) for each in row.stretches) == MOST
    assert row.n_left_out == 500


def test_trainer_figures_shade_the_response_by_sign_and_size() -> None:
    figures = np.asarray([0.0, 0.5, -4.0, np.nan, np.inf, 4.0, 2.6, -0.1], np.float32)
    _, response = token_row(0, segment([1, 2], [1] * 8), figures).stretches
    assert [token.shade for token in response.tokens] == [0, 1, -3, 0, 0, 3, 2, -1]
    assert response.tokens[2].figure == -4.0
    prompt, response = token_row(0, segment([1, 2], [1]), np.zeros(1, np.float32)).stretches
    assert [token.figure for token in (*prompt.tokens, *response.tokens)] == [None, None, 0.0]
    assert response.tokens[0].shade == 0
