"""Faults of the double, at random or by name: the occasional failures of engines, proxies and networks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from farm.errors import UsageError

STATUSES: Mapping[str, int] = {"500": 500, "502": 502, "429": 429, "503": 503}
FAULTS: Mapping[str, str] = {
    "500": "answers 500, with an engine's error body",
    "502": "answers 502, as a proxy does: HTML",
    "429": "answers 429 with Retry-After",
    "503": "answers 503, as an engine with a full queue",
    "close": "closes the connection before it answers",
    "reset": "cuts the connection half way through the answer",
    "slow": "answers late",
    "hang": "never answers",
    "lengths": "gives one log-probability less than ids",
    "echo": "says that the prompt was another",
    "garbage": "answers 200 with what is no JSON",
}


class NoSuchFault(UsageError):
    """The message lists the known faults."""


class Faults:
    """`rates` are shares of all calls; the affected calls depend only on the seed and the calls' numbers."""

    def __init__(
        self,
        rates: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
        retry_after_s: float = 1.0,
        slow_s: float = 1.0,
    ) -> None:
        self.retry_after_s = retry_after_s
        self.slow_s = slow_s
        self.n_struck: Counter[str] = Counter()
        self._next: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._rates: dict[str, float] = {}
        self.set_rates(rates or {})

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Replace the rates. Raises NoSuchFault."""
        for kind in rates:
            _check(kind)
        self._rates = dict(rates)

    def fail_next(self, kind: str, n: int = 1) -> None:
        """Inject a fault into the next n calls, before any random one. Raises NoSuchFault."""
        _check(kind)
        self._next[kind] += n

    def clear(self) -> None:
        self._next.clear()
        self._rates.clear()

    def strike(self) -> str:
        """Return the fault of this call; empty for none."""
        kind = next((kind for kind, n in self._next.items() if n > 0), "")
        if kind:
            self._next[kind] -= 1
        else:
            kind = self._by_chance()
        if kind:
            self.n_struck[kind] += 1
        return kind

    def _by_chance(self) -> str:
        if not self._rates:
            return ""
        point = self._draw.random()
        for kind, rate in self._rates.items():
            point -= rate
            if point < 0:
                return kind
        return ""


def rates(texts: list[str]) -> dict[str, float]:
    """Parse `500:0.1` and the like. Raises NoSuchFault."""
    result = {}
    for text in texts:
        kind, _, share = text.partition(":")
        _check(kind)
        try:
            result[kind] = float(share or 1)
        except ValueError:
            raise UsageError(f"{text!r} has no share: write it as {kind}:0.1") from None
    return result


def _check(kind: str) -> None:
    if kind not in FAULTS:
        raise NoSuchFault(f"there is no fault {kind!r}; there are {', '.join(FAULTS)}")
