"""One call and its attempts so far: on which engines it failed, and the decision to give up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from farm.errors import EngineError
from workers.policy.generation import EngineUnfit
from workers.policy.routing.backend import Backend, CallAborted

_BACKOFF_S = (0.2, 5.0)
_DOUBLINGS = 10
_MAX_FAILURES = 3
"""Maximum failures of one call on each engine in use."""
_MAX_DEATHS = 3
"""Number of engines ejected after this call failed there, from which on it counts as the cause."""


@dataclass(frozen=True, slots=True)
class RetryState:
    """The attempts of one call: an immutable value, whose `after_...` methods return the state after an event.

    `last` is the last failure. By URL: `failures` counts failures, `not_before` is the time of the next attempt,
    `unfit` are the engines that cannot answer the call. `lives` are the engines on which it failed, each with the
    number of its previous ejections.
    """

    last: str = ""
    n_failures: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    not_before: Mapping[str, float] = field(default_factory=dict)
    unfit: frozenset[str] = frozenset()
    lives: frozenset[tuple[Backend, int]] = frozenset()

    def after_failure(self, backend: Backend, error: EngineError, now: float, jitter: float) -> RetryState:
        """Return the state after an attempt without an answer; `jitter` multiplies the following pause."""
        n_ejected = backend.health.n_ejected
        if isinstance(error, CallAborted):
            lives = self.lives | {(backend, n_ejected - 1)} if error.died else self.lives
            return replace(self, last=str(error), n_failures=self.n_failures + error.died, lives=lives)
        n = self.failures.get(backend.url, 0) + 1
        pause_s = min(_BACKOFF_S[0] * 2 ** min(n - 1, _DOUBLINGS), _BACKOFF_S[1]) * jitter
        return replace(
            self,
            last=str(error),
            n_failures=self.n_failures + 1,
            failures={**self.failures, backend.url: n},
            not_before={**self.not_before, backend.url: now + pause_s},
            lives=self.lives | {(backend, n_ejected)},
        )

    def after_unfit(self, backend: Backend, error: EngineUnfit, now: float) -> RetryState:
        """Return the state after an attempt on an engine that is unfit for this call; another may be fit."""
        not_before = {**self.not_before, backend.url: now + _BACKOFF_S[1]}
        return replace(self, last=str(error), unfit=self.unfit | {backend.url}, not_before=not_before)

    def unfit_everywhere(self, serving: Sequence[Backend]) -> bool:
        """Return whether every engine is unfit for the call."""
        return all(backend.url in self.unfit for backend in serving)

    def may_try(self, url: str, now: float) -> bool:
        return self.not_before.get(url, 0.0) <= now

    def failed_on(self, backend: Backend) -> bool:
        return backend.url in self.failures

    def failed_everywhere(self, in_use: Sequence[Backend]) -> bool:
        """Return whether the call has failed `_MAX_FAILURES` times on each engine in use."""
        return bool(in_use) and all(self.failures.get(backend.url, 0) >= _MAX_FAILURES for backend in in_use)

    @property
    def kills_engines(self) -> bool:
        """True if so many engines were ejected after the call failed there that it may be the cause."""
        return sum(backend.health.n_ejected > n_before for backend, n_before in self.lives) >= _MAX_DEATHS


@dataclass(slots=True, eq=False)
class Call:
    """One call of a rollout, which tries engines until one has answered.

    `n_tokens` is its load, `most_answer_tokens` the maximum length of its answer, if known. `began` and `since` are the
    start times of the call and of its current attempt, None before the first; `failure` is that of its last attempt, if
    it failed; `paused_s` is that of its rollout when the current attempt began.
    """

    n_tokens: int
    most_answer_tokens: int | None = None
    began: float | None = None
    since: float = 0.0
    failure: str = ""
    paused_s: float = 0.0
    tries: RetryState = field(default_factory=RetryState)

    @property
    def most_tokens(self) -> int | None:
        """The load of the call with an answer of maximum length; None if unknown."""
        return None if self.most_answer_tokens is None else self.n_tokens + self.most_answer_tokens

    def begin(self, now: float) -> None:
        """Set the times of a call before its first attempt."""
        if self.began is None:
            self.began = self.since = now

    def failed(self, failure: str, now: float) -> None:
        self.failure, self.since = failure, now

    def is_mostly_failed(self, now: float) -> bool:
        """Return whether more of its time went to failed attempts than to the current one."""
        return bool(self.failure) and self.began is not None and now - self.since < self.since - self.began
