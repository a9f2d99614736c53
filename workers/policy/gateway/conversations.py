"""The new messages of a request: those after the longest prefix that was answered before.

Messages are compared by meaning, as clients add keys, reorder them, turn null into an empty string and drop reasoning.
A client that rewrites its history starts a new conversation each time, and all of it is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import orjson

from farm.records.trajectory import Message
from workers.policy.gateway.dialects import model_api


class HashedConversation:
    """The messages of a request, each with the digest of the conversation up to it."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._running = hashlib.blake2b(digest_size=16)
        self.digests = [_add(self._running, message) for message in messages]

    @property
    def digest(self) -> bytes:
        """The digest of the whole conversation; equal for conversations of equal meaning."""
        return self._running.digest()

    def with_answer(self, answer: Message) -> bytes:
        """Return the digest of these messages followed by the answer to them."""
        return _add(self._running.copy(), answer)


class Conversations:
    """The answered conversations of one rollout."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def new(self, conversation: HashedConversation) -> list[Message]:
        """Return the messages after the longest known prefix of the conversation."""
        digests = conversation.digests
        n_known = next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._known), 0)
        return list(conversation.messages[n_known:])

    def add(self, conversation: HashedConversation, answer: Message) -> None:
        """Remember a conversation together with its answer."""
        self._known.add(conversation.with_answer(answer))


def _add(running: hashlib.blake2b, message: Message) -> bytes:
    meaning = _meaning(message)
    running.update(b"%d:%s" % (len(meaning), meaning))
    return running.digest()


def _meaning(message: Message) -> bytes:
    """Return role, content and calls as bytes. Ids of calls are omitted: some clients assign their own."""
    content = message.get("content")
    # Parts contain images by their digests.
    text = content if isinstance(content, list) else model_api.content(message)
    if message.get("role") == "assistant":
        # Many clients trim the end of an answer.
        text = model_api.content(message).strip()
    calls = (
        [(call.name, _arguments(call.arguments)) for call in model_api.calls(message)]
        if "tool_calls" in message
        else []
    )
    return orjson.dumps([message.get("role"), text, calls])


def _arguments(text: str) -> str:
    try:
        return orjson.dumps(orjson.loads(text or "{}"), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        # Not JSON, or nested too deep to encode.
        return text
