"""Token ids of training rows in stretches of the same look: by mask, weights, log-probability, or a trainer's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import NO_VERSION, Segment

MOST = 20_000
"""The number of tokens of a row that a page shows."""
_LEVELS = (-0.05, -0.5, -1.5, -3.0)
"""Log-probabilities below which a token gets the next darker level."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its position in the row, its id, and `level`, 0 to 4 by how unlikely it was; -1 if it was not sampled.

    `figure` is a trainer's value, None without one; `shade` is -3 to 3 of it, relative to the largest of the row.
    """

    position: int
    token_id: int
    logprob: float
    level: int
    figure: float | None = None
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind. `version` are the weights that sampled them, None if none did."""

    kind: str
    """`prompt`, `sampled` or `observed`."""
    version: int | None
    tokens: Sequence[Token]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training row for display, without `n_left_out` tokens at its end."""

    index: int
    n_prompt: int
    n_response: int
    n_sampled: int
    versions: Sequence[int]
    untrainable: str
    mismatch: int | None
    stretches: Sequence[Stretch]
    n_left_out: int
    mean_logprob: float | None
    turn_rewards: Sequence[tuple[int, float]]


def token_row(index: int, segment: Segment, figures: NDArray[np.float32] | None = None) -> TokenRow:
    """Return a training row in stretches; `figures` are a trainer's values, one for each token of the response."""
    mask = np.concatenate([np.full(len(segment.prompt_ids), 2, np.uint8), segment.response_mask])
    ids = np.concatenate([segment.prompt_ids, segment.response_ids])
    n_prompt = len(segment.prompt_ids)
    none = np.full(n_prompt, NO_VERSION, np.int32)
    versions = np.concatenate([none, segment.policy_versions])
    logprobs = np.concatenate([np.zeros(n_prompt, np.float32), segment.response_logprobs])
    n_shown = min(len(ids), MOST)
    changes = np.flatnonzero((np.diff(mask[:n_shown]) != 0) | (np.diff(versions[:n_shown]) != 0)) + 1
    edges = [0, *changes.tolist(), n_shown] if n_shown else []
    stretches = []
    shades = None if figures is None else _shades(figures)
    for start, end in pairwise(edges):
        kind = {2: "prompt", 1: "sampled"}.get(int(mask[start]), "observed")
        version = int(versions[start])
        tokens = [
            Token(
                at,
                int(ids[at]),
                float(logprobs[at]),
                _level(float(logprobs[at])) if kind == "sampled" else -1,
                None if figures is None or at < n_prompt else float(figures[at - n_prompt]),
                0 if shades is None or at < n_prompt else int(shades[at - n_prompt]),
            )
            for at in range(start, end)
        ]
        stretches.append(Stretch(kind, None if version == NO_VERSION else version, tokens))
    sampled = segment.response_mask == 1
    known = segment.policy_versions[sampled & (segment.policy_versions != NO_VERSION)]
    return TokenRow(
        index,
        n_prompt,
        len(segment.response_ids),
        int(sampled.sum()),
        sorted({int(version) for version in known}),
        segment.untrainable,
        segment.mismatch,
        stretches,
        len(ids) - n_shown,
        float(segment.response_logprobs[sampled].mean()) if sampled.any() else None,
        segment.turn_rewards,
    )


def _shades(figures: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return -3 to 3 for each value, by its share of the largest; 0 for values that are not finite."""
    finite = np.where(np.isfinite(figures), figures, np.float32(0.0))
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    return (np.sign(finite) * np.ceil(np.abs(finite) / largest * 3)).astype(np.int8)


def _level(logprob: float) -> int:
    return sum(logprob < bound for bound in _LEVELS)
