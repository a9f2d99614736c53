"""pass@k: the probability that at least one of k samples is correct, estimated from c correct ones of n."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k), the unbiased estimate (arXiv:2107.03374, section 2.1). Needs k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"there is no pass@{k} of {c} right ones among {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
