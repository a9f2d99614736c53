"""Stop strings in sampled text. The ids hold them, as they were sampled; the message that is shown ends before them."""

from __future__ import annotations

from collections.abc import Sequence

from workers.policy.parsing.regions import any_of, held_from


def before_stop(text: str, reason: str | int | None, stops: Sequence[str]) -> str:
    """The text up to the stop string that ended it, which is `reason`; all of it if none did."""
    if not reason or not isinstance(reason, str) or reason not in stops:
        return text
    head, found, _ = text.rpartition(reason)
    return head if found else text


class StopStream:
    """Passes text on as it comes, but for what may turn out to be a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be passed on now."""
        self._held += text
        if not self._stops:
            return self._give(len(self._held))
        match = any_of(self._stops).search(self._held)
        return self._give(match.start() if match else held_from(self._held, 0, self._stops))

    def end(self, reason: str | int | None) -> str:
        """The rest, up to the stop string that ended it."""
        return before_stop(self._give(len(self._held)), reason, self._stops)

    def _give(self, n: int) -> str:
        given, self._held = self._held[:n], self._held[n:]
        return given
