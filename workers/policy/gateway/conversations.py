"""The conversations and the last answers of a rollout: the new messages of a request, and retries after a lost reply.

Messages are compared by meaning, as clients add keys, reorder them, turn null into an empty string and drop reasoning.
A client that rewrites its history starts a new conversation each time, and all of it is recorded.

A request is identified by the digest of its body, which has its whole conversation. It counts as a retry if its client
disconnected before it read the answer, or declares it: the clients of OpenAI and Anthropic count attempts in a header.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import orjson

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion
from workers.policy.gateway.dialects import model_api

_TRIES = "x-stainless-retry-count"
_MAX_ANSWERS = 8
"""Number of answers to keep, and of unread answers."""
_MAX_ERRORS = 64


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


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether a client declares this request a retry."""
    n_tries = headers.get(_TRIES, "")
    return n_tries.isdecimal() and int(n_tries[:9]) > 0


class RecentAnswers:
    """The last answers of one rollout, its unread answers, and the requests in progress."""

    def __init__(self) -> None:
        self._read: dict[bytes, Completion] = {}
        self._unread: dict[bytes, Completion] = {}
        self._open: dict[bytes, asyncio.Future[None]] = {}
        self._errors: Counter[bytes] = Counter()

    @property
    def n_unread(self) -> int:
        return len(self._unread)

    async def known(self, digest: bytes, retry: bool, settle: Callable[[], Awaitable[None]]) -> Completion | None:
        """Return the answer to an earlier attempt, if any. `settle` waits until all answers are recorded."""
        if retry and self._errors[digest]:
            # Its earlier attempt failed; an equal request of another agent may have an answer.
            self._errors[digest] -= 1
            return None
        while retry and (first := self._open.get(digest)) is not None:
            # The disconnect of its client may not be noticed yet.
            await asyncio.wait({first})
        if digest not in self._unread and not (retry and digest in self._read):
            return None
        # Checked before it is removed, as its client may disconnect again.
        await settle()
        unread = self._unread.pop(digest, None)
        return unread if unread is not None or not retry else self._read.get(digest)

    @contextmanager
    def answering(self, digest: bytes) -> Iterator[None]:
        """Mark a request as in progress. An error that leaves the block is sent to the client."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Of equal concurrent requests only the last is tracked: it is enough to wait for one.
        self._open[digest] = done
        try:
            yield
        except Exception:
            self._errors[digest] += 1
            _drop_first(self._errors, _MAX_ERRORS)
            raise
        finally:
            done.set_result(None)
            if self._open.get(digest) is done:
                del self._open[digest]

    def keep(self, digest: bytes, completion: Completion) -> None:
        """Keep an answer that is sent to its client, without its prompt, which may be long."""
        self._read.pop(digest, None)
        self._read[digest] = replace(completion, prompt_ids=None)
        _drop_first(self._read, _MAX_ANSWERS)

    def went_unread(self, digest: bytes, completion: Completion) -> None:
        """Keep an answer whose client disconnected before it was sent completely."""
        self._unread[digest] = completion
        _drop_first(self._unread, _MAX_ANSWERS)


def _drop_first(kept: dict[bytes, Completion] | Counter[bytes], most: int) -> None:
    while len(kept) > most:
        kept.pop(next(iter(kept)))
