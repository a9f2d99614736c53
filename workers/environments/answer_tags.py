"""The answer of a text between tags, `<answer>` and `</answer>`, found in one pass."""

from __future__ import annotations

MAX_CHARS = 200_000
"""The most characters at the end of a text in which an answer is looked for: more than a response of tokens has."""
_OPENING, _CLOSING = "<answer>", "</answer>"


def last_tagged(text: str) -> str | None:
    """Return what stands between the last pair of tags, stripped; None if there is no pair.

    A pair is an opening tag and the next closing one after it. A regular expression for this takes quadratic time on a
    text of opening tags alone.
    """
    text = text[-MAX_CHARS:]
    place = last_place(text)
    return None if place is None else text[slice(*place)].strip()


def last_place(text: str) -> tuple[int, int] | None:
    """Return where the text between the last pair of tags begins and ends; None if there is no pair."""
    place, at = None, 0
    while (start := text.find(_OPENING, at)) >= 0 and (end := text.find(_CLOSING, start)) >= 0:
        place, at = (start + len(_OPENING), end), end + len(_CLOSING)
    return place
