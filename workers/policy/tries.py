"""How often one call was tried, where, and whether there is hope for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from farm.errors import EngineError
from workers.policy.generation import EngineUnfit
from workers.policy.place import CutOff, Place

_BACKOFF_S = (0.2, 5.0)
_DOUBLINGS = 10
_MAX_FAILURES = 3
"""Of one call on each engine that is in use."""
_MAX_DEATHS = 3
"""Engines that died while this call ran there: it may be what kills them."""


class Tries:
    """The tries of one call."""

    def __init__(self) -> None:
        self.last = ""
        self.n_failures = 0
        self._failures: Counter[str] = Counter()
        self._unfit: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._lives: dict[tuple[str, int], Place] = {}

    def failed(self, place: Place, error: EngineError, now: float) -> None:
        """A try ended without an answer."""
        self.last = str(error)
        url, n_ejected = place.url, place.standing.n_ejected
        if isinstance(error, CutOff):
            self.n_failures += error.died
            if error.died:
                self._lives[url, n_ejected - 1] = place
            return
        self.n_failures += 1
        self._failures[url] += 1
        self._lives[url, n_ejected] = place
        pause_s = min(_BACKOFF_S[0] * 2 ** min(self._failures[url] - 1, _DOUBLINGS), _BACKOFF_S[1])
        self._not_before[url] = now + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def unfit(self, place: Place, error: EngineUnfit, now: float) -> None:
        """The engine is not for this call; another may be."""
        self.last = str(error)
        self._unfit.add(place.url)
        self._not_before[place.url] = now + _BACKOFF_S[1]

    def unfit_everywhere(self, serving: Sequence[Place]) -> bool:
        """Whether there is none that may be for it."""
        return all(place.url in self._unfit for place in serving)

    def not_before(self, url: str) -> float:
        return self._not_before.get(url, 0.0)

    def may_ask(self, url: str, now: float) -> bool:
        return self.not_before(url) <= now

    def failed_on(self, place: Place) -> bool:
        return self._failures[place.url] > 0

    def failed_everywhere(self, in_use: Sequence[Place]) -> bool:
        """Whether all engines in use have failed it often enough."""
        return bool(in_use) and all(self._failures[place.url] >= _MAX_FAILURES for place in in_use)

    @property
    def deadly(self) -> bool:
        """Whether so many engines went out of use after it had failed there that it may be what kills them."""
        n_deaths = sum(place.standing.n_ejected > n_before for (_, n_before), place in self._lives.items())
        return n_deaths >= _MAX_DEATHS
