"""Resampling: the percentile bootstrap for intervals, and the sign-flip permutation test for pairs.

Both are seeded, so that one evaluation always reports the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 10_000
CONFIDENCE = 0.95
_MOST_EXACT = 14
"""Up to this many non-zero differences, all 2^n signs are enumerated."""
_CELLS = 4_000_000
_SEED = 20_210_707


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` instances, with the bounds of its interval."""

    value: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values, one for each instance, with its 95 % percentile bootstrap interval; None for none."""
    if not values:
        return None
    given = np.asarray(values, np.float64)
    means = _resampled_means(given)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(float(given.mean()), float(low), float(high), len(given))


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CELLS // len(values))
    means = [
        values[generator.integers(0, len(values), (min(rows, N_RESAMPLES - start), len(values)))].mean(axis=1)
        for start in range(0, N_RESAMPLES, rows)
    ]
    return np.concatenate(means)


def sign_flip_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of paired differences: the share of sign flips with a mean at least as far from 0.

    Under the null hypothesis each difference is equally likely with either sign. Few differences are flipped in all
    ways; many in 10,000 random ones, which include the observed one (Phipson and Smyth 2010), so p is never 0.
    """
    moved = np.asarray([value for value in differences if value != 0.0], np.float64)
    if not len(moved):
        return 1.0
    seen = abs(float(moved.sum()))
    # sums of the same numbers in another order may differ in the last digits
    bound = seen - 1e-9 * float(np.abs(moved).sum())
    if len(moved) <= _MOST_EXACT:
        flips = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float((np.abs((1.0 - 2.0 * flips) @ moved) >= bound).mean())
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CELLS // len(moved))
    n_as_far = 0
    for start in range(0, N_RESAMPLES, rows):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (min(rows, N_RESAMPLES - start), len(moved)))
        n_as_far += int((np.abs(signs @ moved) >= bound).sum())
    return (n_as_far + 1) / (N_RESAMPLES + 1)
