"""The progress of the running task's call on its connection, to attribute a passed deadline.

The rule: an answer in progress counts as the policy's only as long as tokens arrive. A whole answer is sent after
sampling, so its bytes arrive at once; a stream brings a token every few seconds. An answer whose bytes arrive otherwise
is stalled: a deadline that passes meanwhile is attributed to the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_BODY_S = 5.0
_TOKEN_S = 20.0


class Progress:
    """The progress of one call. Times are of the monotonic clock; None until they occur."""

    def __init__(self) -> None:
        self.body_since: float | None = None
        self.token_at: float | None = None
        self._sent_at: float | None = None

    def restart(self) -> None:
        """Record that a request is sent."""
        self.body_since = self.token_at = None
        self._sent_at = time.monotonic()

    def body(self) -> None:
        """Record that the head of a whole answer has arrived."""
        self.body_since = time.monotonic()

    def token(self) -> None:
        """Record that a stream began, or brought a token."""
        self.token_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds for which a request has had no answer at all; 0 once it has one, infinite if none was sent."""
        if self.body_since is not None or self.token_at is not None:
            return 0.0
        return math.inf if self._sent_at is None else time.monotonic() - self._sent_at

    @property
    def stalled(self) -> str:
        """The reason why the call has no answer although its engine sends bytes; empty if it is not stalled."""
        now = time.monotonic()
        if self.body_since is not None and now - self.body_since > _BODY_S:
            return f"has been sending one answer for {now - self.body_since:.0f} s"
        if self.token_at is not None and now - self.token_at > _TOKEN_S:
            return f"has sent no token of an answer for {now - self.token_at:.0f} s"
        return ""


_current: ContextVar[Progress | None] = ContextVar("progress", default=None)


def current() -> Progress:
    """Return the progress of the running task, or an unused one if there is none."""
    return _current.get() or Progress()


@contextmanager
def watched() -> Iterator[Progress]:
    """Record the progress of the call that the block makes."""
    progress, outer = Progress(), _current.get()
    _current.set(progress)
    try:
        yield progress
    finally:
        # Not by a reset token: an abandoned call is closed in another context.
        _current.set(outer)
