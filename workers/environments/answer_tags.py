"""Finds the answer in a text between `<answer>` and `</answer>`, in one pass."""

from __future__ import annotations

MAX_CHARS = 200_000
"""Number of characters at the end of a text to search: more than a response of tokens has."""
_OPENING, _CLOSING = "<answer>", "</answer>"


def last_tagged(text: str) -> str | None:
    """Return the text between the last pair of tags, stripped; None if there is no pair.

    A pair is an opening tag and the next closing one after it. A regular expression for this would take quadratic time
    on a text of only opening tags.
    """
    text = text[-MAX_CHARS:]
    span = last_span(text)
    return None if span is None else text[slice(*span)].strip()


def last_span(text: str) -> tuple[int, int] | None:
    """Return start and end of the text between the last pair of tags; None if there is no pair."""
    span, at = None, 0
    while (start := text.find(_OPENING, at)) >= 0 and (end := text.find(_CLOSING, start)) >= 0:
        span, at = (start + len(_OPENING), end), end + len(_CLOSING)
    return span
