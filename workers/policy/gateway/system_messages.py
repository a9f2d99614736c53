"""Merges system messages to a single one at the beginning, which every chat template accepts.

Agents send several at the beginning, or new ones in the middle; many templates refuse those or drop them silently.
Leading ones are joined, which loses nothing; a later one becomes a user message in its place, so that all ids before it
stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from farm.records.trajectory import Message
from workers.policy.message_images import joined

_JOIN = "\n\n"


def one_leading(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with at most one system message, the first.

    A user message next to a converted system message is joined with it, as many templates require alternating roles.
    """
    leading = list(takewhile(_is_system, messages))
    result: list[Message] = []
    if leading:
        result.append({"role": "system", "content": _JOIN.join(message["content"] for message in leading)})
    moved = False
    for message in messages[len(leading) :]:
        was_moved, moved = moved, _is_system(message)
        ready: Message = {**message, "role": "user"} if moved else message
        if (moved or was_moved) and ready["role"] == "user" and result and result[-1]["role"] == "user":
            result[-1] = {**result[-1], "content": joined([result[-1]["content"], ready["content"]], _JOIN)}
        else:
            result.append(ready)
    return result


def _is_system(message: Message) -> bool:
    return bool(message.get("role") == "system")
