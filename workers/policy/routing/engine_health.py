"""The health of one engine, as seen by this process: in use, ejected, busy, or readmitted with a slow start.

An immutable value: each method returns the health after an event. It has no clock and no randomness: callers pass the
event loop's time in seconds, and the jitter by which a delay is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_OUT_S = (1.0, 30.0)
"""The first and the longest ejection of a failing engine; the duration doubles each time."""
_BUSY_S = (0.25, 15.0)
"""The same for an engine that is busy and sends no `Retry-After`."""
_MAX_BUSY_S = 120.0
_DOUBLINGS = 16
"""Far above either limit; prevents an overflow of the power after many ejections."""
_SLOW_START_S = 10.0
_FIRST_SHARE = 0.1
_MAX_CALL_FAILURES = 3
_WINDOW = 16
_ALL_ANSWERED = ("",) * _WINDOW
_MIN_CALLS = 8
"""The number of calls from which on the share of failures counts, even with answers in between."""
_MAX_CHECK_FAILURES = 2


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The health of one engine, as seen by this process.

    `since` is the start of its current use, None if before this process began. `reason` is that of its ejection, empty
    while it is in use; `n_ejected` counts all ejections, `n_out` those since it last answered reliably. Failed calls
    and checks are counted consecutively. `last_calls` are the calls since `since`: the rollout id of each failed one,
    an empty string for each answered one.
    """

    since: float | None = None
    reason: str = ""
    ejected_until: float = 0.0
    busy_until: float = 0.0
    n_ejected: int = 0
    n_out: int = 0
    n_busy: int = 0
    n_failed_checks: int = 0
    n_failed_calls: int = 0
    failed_rollouts: frozenset[str] = frozenset()
    last_calls: tuple[str, ...] = ()

    @property
    def is_ejected(self) -> bool:
        return bool(self.reason)

    @property
    def is_suspect(self) -> bool:
        """True if the last health check failed, so that the next is due soon."""
        return self.n_failed_checks > 0

    @property
    def fails_checks(self) -> bool:
        """True if it should be ejected for its health checks: two failed, or one plus a call."""
        return self.n_failed_checks >= _MAX_CHECK_FAILURES or (self.n_failed_checks > 0 and self.n_failed_calls > 0)

    @property
    def failed_calls(self) -> str:
        """The calls for which it should be ejected (several in a row, or half of many); empty if it should not be.

        Failures of a single rollout do not count: one request can fail on every engine.
        """
        if self.n_failed_calls >= _MAX_CALL_FAILURES and len(self.failed_rollouts) > 1:
            return "call after call"
        failed = [each for each in self.last_calls if each]
        n = len(self.last_calls)
        if n >= _MIN_CALLS and 2 * len(failed) >= n and len(set(failed)) > 1:
            return f"{len(failed)} of its last {n} calls"
        return ""

    def share(self, now: float) -> float:
        """Return the share of its speed to count on now: less than 1 while it is new or just readmitted."""
        if self.since is None or now - self.since >= _SLOW_START_S:
            return 1.0
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * max(0.0, now - self.since) / _SLOW_START_S

    def after_answer(self) -> EngineHealth:
        """Return the health after an answered call."""
        if self.last_calls == _ALL_ANSWERED and not (self.n_busy or self.n_out or self.n_failed_checks):
            return self
        last = (*self.last_calls, "")[-_WINDOW:]
        # The ejections of an engine that both answers and fails keep getting longer.
        n_out = 0 if len(last) >= _MIN_CALLS and not any(last) else self.n_out
        return replace(self, n_busy=0, n_out=n_out, last_calls=last)._without_failures()

    def after_failure(self, rollout_id: str) -> EngineHealth:
        """Return the health after a failed call; check `failed_calls` then."""
        return replace(
            self,
            n_failed_calls=self.n_failed_calls + 1,
            failed_rollouts=self.failed_rollouts | {rollout_id},
            last_calls=(*self.last_calls, rollout_id)[-_WINDOW:],
        )

    def after_check(self, well: bool) -> EngineHealth:
        """Return the health after a health check; check `fails_checks` then."""
        return replace(self, n_failed_checks=0 if well else self.n_failed_checks + 1)

    def ejected(self, now: float, why: str) -> EngineHealth:
        """Return the health of the ejected engine, or with another reason if it already is."""
        return replace(self, n_ejected=self.n_ejected + (not self.is_ejected), reason=why).ejected_longer(now)

    def ejected_longer(self, now: float) -> EngineHealth:
        """Return the health after a failed attempt to readmit it."""
        out_s = min(_OUT_S[0] * 2 ** min(self.n_out, _DOUBLINGS), _OUT_S[1])
        return replace(self, ejected_until=now + out_s, n_out=self.n_out + 1)

    def readmitted(self, now: float) -> EngineHealth:
        """Return the health of the engine back in use, with a clean record."""
        return replace(self, reason="", since=now, last_calls=())._without_failures()

    def after_refusal(self, now: float, retry_after_s: float | None, jitter: float) -> EngineHealth:
        """Return the health of a busy engine, for `retry_after_s` if known, else with backoff.

        Simultaneous refusals count once.
        """
        n_busy = self.n_busy + (now >= self.busy_until)
        backoff_s = min(_BUSY_S[0] * 2 ** min(n_busy - 1, _DOUBLINGS), _BUSY_S[1]) * jitter
        wait_s = backoff_s if retry_after_s is None else min(retry_after_s, _MAX_BUSY_S)
        return replace(self, n_busy=n_busy, busy_until=max(self.busy_until, now + wait_s))

    def after_resume(self) -> EngineHealth:
        """Return the health without the busy state, which a pause had caused."""
        return replace(self, busy_until=0.0, n_busy=0)

    def _without_failures(self) -> EngineHealth:
        return replace(self, n_failed_checks=0, n_failed_calls=0, failed_rollouts=frozenset())
