"""Stop strings in sampled text. The ids keep them, as sampled; the visible message ends before them."""

from __future__ import annotations

from collections.abc import Sequence

from workers.policy.tool_calls.scanner import any_of, held_from


def before_stop(text: str, reason: str | int | None, stops: Sequence[str]) -> str:
    """Return the text up to `reason`, the stop string that ended it; all of it if none did."""
    if not reason or not isinstance(reason, str) or reason not in stops:
        return text
    head, result, _ = text.rpartition(reason)
    return head if result else text


class StopStream:
    """Filters streamed text: holds back what may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text, and return the part that can be passed on now."""
        self._held += text
        if not self._stops:
            return self._give(len(self._held))
        # A longer one may have begun before a complete one.
        n = held_from(self._held, 0, self._stops)
        match = any_of(self._stops).search(self._held)
        return self._give(min(n, match.start()) if match else n)

    def end(self, reason: str | int | None) -> str:
        """Return the rest, up to the stop string that ended it."""
        return before_stop(self._give(len(self._held)), reason, self._stops)

    def _give(self, n: int) -> str:
        result, self._held = self._held[:n], self._held[n:]
        return result
