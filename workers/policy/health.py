"""How one engine stands with this process: in use, out for a while, busy, or just back and given little at first.

A state machine without a clock of its own: times are handed in, in seconds of the event loop's clock.
"""

from __future__ import annotations

import random
from collections import deque

_OUT_S = (1.0, 30.0)
"""An engine that fails is left alone this long; doubles each time it fails again."""
_BUSY_S = (0.25, 15.0)
"""The same for one that is busy and does not say for how long."""
_LONGEST_BUSY_S = 120.0
_DOUBLINGS = 16
"""Far beyond either bound; without it the power would overflow once an engine was out for a night."""
_SLOW_START_S = 10.0
_FIRST_SHARE = 0.1
_MAX_CALL_FAILURES = 3
_WINDOW = 16
_MIN_CALLS = 8
"""So many calls say how large the share of those is that fail, answers in between or not."""
_MAX_CHECK_FAILURES = 2


class Standing:
    """One engine as this process sees it."""

    def __init__(self, since: float | None = None) -> None:
        self.why = ""
        """Why it is out; empty while it is in use."""
        self.out_until = 0.0
        self.busy_until = 0.0
        self.n_ejected = 0
        """How often it went out of use."""
        self._since = since
        self._n_out = 0
        self._n_busy = 0
        self._n_checks = 0
        self._n_calls = 0
        self._rollouts: set[str] = set()
        self._last: deque[str] = deque(maxlen=_WINDOW)
        """The last calls since it is in use: the rollout of each that failed, and nothing for each answer."""

    @property
    def out(self) -> bool:
        return bool(self.why)

    def share(self, now: float) -> float:
        """Of its speed, how much may be counted on now: less while it is new or just back."""
        if self._since is None or now - self._since >= _SLOW_START_S:
            return 1.0
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * max(0.0, now - self._since) / _SLOW_START_S

    def answered(self) -> None:
        """It answered a call."""
        self._n_calls = self._n_checks = self._n_busy = 0
        self._rollouts.clear()
        self._last.append("")
        if len(self._last) >= _MIN_CALLS and not any(self._last):
            # one that answers now and then and fails in between is out for longer each time
            self._n_out = 0

    def failed(self, rollout_id: str) -> str:
        """It failed a call. Which calls it failed if it should be out, else empty: several in a row, or half of many.

        But not all of one rollout: a single request can fail everywhere, which is not for the engine to answer for.
        """
        self._n_calls += 1
        self._rollouts.add(rollout_id)
        self._last.append(rollout_id)
        if self._n_calls >= _MAX_CALL_FAILURES and len(self._rollouts) > 1:
            return "call after call"
        failed = [each for each in self._last if each]
        if len(self._last) >= _MIN_CALLS and 2 * len(failed) >= len(self._last) and len(set(failed)) > 1:
            return f"{len(failed)} of its last {len(self._last)} calls"
        return ""

    def checked(self, well: bool) -> bool:
        """It was asked for its health. True if it should be out."""
        self._n_checks = 0 if well else self._n_checks + 1
        return self._n_checks >= _MAX_CHECK_FAILURES or (self._n_checks > 0 and self._n_calls > 0)

    @property
    def failing(self) -> bool:
        """Whether the last call failed."""
        return self._n_calls > 0

    @property
    def doubtful(self) -> bool:
        """Whether to look again soon."""
        return self._n_checks > 0

    def eject(self, now: float, why: str) -> None:
        self.n_ejected += not self.out
        self.why = why
        self.stay_out(now)

    def stay_out(self, now: float) -> None:
        self.out_until = now + min(_OUT_S[0] * 2 ** min(self._n_out, _DOUBLINGS), _OUT_S[1])
        self._n_out += 1

    def bring_back(self, now: float) -> None:
        self.why = ""
        self._since = now
        self._n_checks = self._n_calls = 0
        self._rollouts.clear()
        self._last.clear()

    def busy(self, now: float, retry_after_s: float | None) -> None:
        """It asked to be left alone, for so long if it says that. Many who are told so at once are one time."""
        self._n_busy += now >= self.busy_until
        backoff_s = min(_BUSY_S[0] * 2 ** min(self._n_busy - 1, _DOUBLINGS), _BUSY_S[1]) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        wait_s = backoff_s if retry_after_s is None else min(retry_after_s, _LONGEST_BUSY_S)
        self.busy_until = max(self.busy_until, now + wait_s)

    def resumed(self) -> None:
        """It was busy because it was paused, and is no more."""
        self.busy_until = 0.0
        self._n_busy = 0
