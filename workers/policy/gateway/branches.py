"""Which messages of a request are new: those after the longest conversation that was answered before.

Messages are compared by what they mean, as clients add keys, reorder them, turn null into an empty string and drop
reasoning. One that rewrites its history begins a conversation of its own each time, and all of it is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import orjson

from farm.trajectory import Message
from workers.policy.gateway import wire


class Conversation:
    """All messages of a request, and for each the digest of it and those before it."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._running = hashlib.blake2b(digest_size=16)
        self.digests = [_add(self._running, message) for message in messages]

    @property
    def digest(self) -> bytes:
        """The same for all conversations that mean the same."""
        return self._running.digest()

    def with_answer(self, answer: Message) -> bytes:
        """The digest of the conversation that begins with these messages and the answer to them."""
        return _add(self._running.copy(), answer)


class Branches:
    """The conversations of one rollout that were answered."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def new(self, asked: Conversation) -> list[Message]:
        """The messages that no conversation known so far holds already, in this place."""
        digests = asked.digests
        n_known = next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._known), 0)
        return list(asked.messages[n_known:])

    def add(self, asked: Conversation, answer: Message) -> None:
        """What the policy answered."""
        self._known.add(asked.with_answer(answer))


def _add(running: hashlib.blake2b, message: Message) -> bytes:
    meaning = _meaning(message)
    running.update(b"%d:%s" % (len(meaning), meaning))
    return running.digest()


def _meaning(message: Message) -> bytes:
    """Role, text and calls. Ids of calls are left out: some clients give their own."""
    text = wire.content(message)
    if message.get("role") == "assistant":
        # ends of answers are trimmed by many clients
        text = text.strip()
    calls = [(call.name, _arguments(call.arguments)) for call in wire.calls(message)] if "tool_calls" in message else []
    return orjson.dumps([message.get("role"), text, calls])


def _arguments(text: str) -> str:
    try:
        return orjson.dumps(orjson.loads(text or "{}"), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        # no JSON, or nested deeper than can be written
        return text
