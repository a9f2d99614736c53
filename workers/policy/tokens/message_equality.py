"""Equality of messages by meaning: clients send back the messages that they received, but seldom byte for byte.

They add keys, reorder them, turn null into an empty string, a string into a list of parts, rewrite arguments, invent
call ids and drop the reasoning; none of this changes the model's input. The client's own messages (user, system and
tool) must be the same text, as it was encoded. In the policy's own text, space at either end is ignored: clients strip
it, one provider's API demands it, and the sampled ids are kept anyway.
"""

from __future__ import annotations

from typing import Any

import orjson

from farm.records.trajectory import Message
from workers.policy.tokens.messages import reasoning, text_of

CallIds = dict[str, str]
"""Maps the client's tool call ids to the held ones, where they differ."""


def equivalent(held: Message, given: Message, ids: CallIds) -> CallIds | None:
    """Return the call ids that this message renames if `given` equals `held` in meaning; else None.

    `ids` are the call ids renamed by earlier messages of the conversation.
    """
    if held is given or held == given:
        return {}
    role = held.get("role")
    if role != given.get("role") or not _agree(held.get("name"), given.get("name")):
        return None
    if role == "assistant":
        return _same_turn(held, given)
    if role == "tool" and not _agree(held.get("tool_call_id"), with_call_ids(given, ids).get("tool_call_id")):
        return None
    return {} if _same_text(held, given) else None


def with_call_ids(given: Message, ids: CallIds) -> Message:
    """Return a client's message with its call id replaced by the held one."""
    call_id = given.get("tool_call_id")
    return {**given, "tool_call_id": ids[call_id]} if call_id in ids else given


def _agree(ours: Any, theirs: Any) -> bool:
    """Return whether they are equal, or at least one is missing."""
    return not ours or not theirs or bool(ours == theirs)


def _same_turn(held: Message, given: Message) -> CallIds | None:
    if not (_same_text(held, given, strip=True) and _same_reasoning(held, given)):
        return None
    ours, theirs = held.get("tool_calls") or [], given.get("tool_calls") or []
    if len(ours) != len(theirs) or not all(map(_same_function, ours, theirs)):
        return None
    pairs = [(our.get("id"), their.get("id")) for our, their in zip(ours, theirs, strict=True)]
    return {their: our for our, their in pairs if our and their and our != their}


def _same_text(held: Message, given: Message, strip: bool = False) -> bool:
    ours, theirs = held.get("content"), given.get("content")
    if ours == theirs or (not ours and not theirs):
        return True
    for join in ("\n", ""):
        our_text, their_text = text_of(ours, join), text_of(theirs, join)
        if our_text is None or their_text is None:
            return False
        if our_text == their_text or (strip and our_text.strip() == their_text.strip()):
            return True
    return False


def _same_reasoning(held: Message, given: Message) -> bool:
    """Return whether the reasoning is equal or missing: a client may drop it, but not change it."""
    text = reasoning(given).strip()
    return not text or text == reasoning(held).strip()


def _same_function(held: dict[str, Any], given: dict[str, Any]) -> bool:
    ours, theirs = held.get("function") or {}, given.get("function") or {}
    return ours.get("name") == theirs.get("name") and _same_arguments(ours.get("arguments"), theirs.get("arguments"))


def _same_arguments(ours: Any, theirs: Any) -> bool:
    if ours == theirs or (not ours and not theirs):
        return True
    try:
        return bool(_parsed(ours) == _parsed(theirs))
    except orjson.JSONDecodeError:
        return False


def _parsed(raw: Any) -> Any:
    return orjson.loads(raw or "{}") if isinstance(raw, str) or raw is None else raw
