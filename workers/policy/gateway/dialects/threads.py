"""Conversations that the messages API stores for its client: a thread, continued by the id of its last answer.

A request that continues a thread has only the new messages: system prompt and tools are the thread's. So an unknown
thread is refused, and its client sends everything again; no answer is based on a part of a conversation.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.records.trajectory import Message
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import BadRequest

_OF_THE_THREAD = ("system", "tools")
"""The fields that a thread keeps from its creation; a request that continues it omits them."""


@dataclass(frozen=True, slots=True)
class StoredThread:
    """A thread's fields from its creation, and its messages up to the last answer."""

    fields: Mapping[str, Any]
    messages: Sequence[Message]


class ThreadStore:
    """The threads of one rollout, by the ids of their answers. Any answer may be continued, more than once."""

    def __init__(self) -> None:
        self._by_answer: dict[str, StoredThread] = {}

    def begun(self, body: Mapping[str, Any]) -> StoredThread | None:
        """Return the thread that a request creates or continues; None without one.

        Raises BadRequest for an unknown thread, or for a system prompt or tools that differ from the thread's.
        """
        result = body.get("thread")
        if result is None:
            return None
        kind = result.get("type") if isinstance(result, dict) else None
        if kind == "create":
            return StoredThread({name: body[name] for name in _OF_THE_THREAD if body.get(name)}, ())
        if kind != "continue":
            raise BadRequest("must be an object of type 'create' or 'continue'", "thread")
        answer_id = model_api.word(result.get("previous_message_id"), "thread.previous_message_id")
        thread = self._by_answer.get(answer_id)
        if thread is None:
            raise _refused(404, "thread_not_found", f"no thread is stored for {answer_id!r}: send all messages again")
        for name in _OF_THE_THREAD:
            if body.get(name) and body[name] != thread.fields.get(name):
                raise _refused(400, "thread_fingerprint_mismatch", f"{name} differs from the thread's: create another")
        return thread

    def hold(self, answer_id: str, thread: StoredThread, messages: Sequence[Message]) -> None:
        """Store a thread under the id of its newest answer, the last of `messages`."""
        self._by_answer[answer_id] = StoredThread(thread.fields, messages)


def _refused(status: int, code: str, message: str) -> BadRequest:
    # The official clients decide by `error_code` whether to send the whole conversation again.
    return BadRequest(message, "thread", status=status, details={"error_code": code})
