"""The conversations of one rollout as a tree: every message once, every branch, and the answered calls.

Messages are equal by meaning: clients send back the messages that they received, but seldom byte for byte. They add
keys, reorder them, turn null into an empty string, a string into a list of parts, rewrite arguments, invent call ids
and drop the reasoning; none of this changes the model's input. The client's own messages (user, system and tool) must
be the same text, as it was encoded. In the policy's own text, space at either end is ignored: clients strip it, one
provider's API demands it, and the sampled ids are kept anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from farm.records.trajectory import Message, TokenIds
from workers.policy.tokens.conversation_skeleton import ConversationSkeleton
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


def _agree(one: Any, other: Any) -> bool:
    return not one or not other or bool(one == other)


def _same_turn(held: Message, given: Message) -> CallIds | None:
    if not (_same_text(held, given, strip=True) and _same_reasoning(held, given)):
        return None
    held_calls, given_calls = held.get("tool_calls") or [], given.get("tool_calls") or []
    if len(held_calls) != len(given_calls) or not all(map(_same_function, held_calls, given_calls)):
        return None
    pairs = [(one.get("id"), other.get("id")) for one, other in zip(held_calls, given_calls, strict=True)]
    return {given_id: held_id for held_id, given_id in pairs if held_id and given_id and held_id != given_id}


def _same_text(held: Message, given: Message, strip: bool = False) -> bool:
    held_content, given_content = held.get("content"), given.get("content")
    if held_content == given_content or (not held_content and not given_content):
        return True
    for join in ("\n", ""):
        held_text, given_text = text_of(held_content, join), text_of(given_content, join)
        if held_text is None or given_text is None:
            return False
        if held_text == given_text or (strip and held_text.strip() == given_text.strip()):
            return True
    return False


def _same_reasoning(held: Message, given: Message) -> bool:
    """Return whether the reasoning is equal or missing: a client may drop it, but not change it."""
    text = reasoning(given).strip()
    return not text or text == reasoning(held).strip()


def _same_function(held: dict[str, Any], given: dict[str, Any]) -> bool:
    held_function, given_function = held.get("function") or {}, given.get("function") or {}
    return held_function.get("name") == given_function.get("name") and _same_arguments(
        held_function.get("arguments"), given_function.get("arguments")
    )


def _same_arguments(one: Any, other: Any) -> bool:
    if one == other or (not one and not other):
        return True
    try:
        return bool(_parsed(one) == _parsed(other))
    except orjson.JSONDecodeError:
        return False


def _parsed(raw: Any) -> Any:
    return orjson.loads(raw or "{}") if isinstance(raw, str) or raw is None else raw


@dataclass(slots=True)
class CachedTurn:
    """An answered call. `continues` is the call whose ids it began with, `added` [n] its further ids.

    `response` are the sampled ones among them, `turn` the message as marked in outlines.
    """

    number: int
    continues: CachedTurn | None
    added: TokenIds
    response: TokenIds
    turn: Message

    @property
    def n_first_prompt(self) -> int:
        """The number of ids of the first call's prompt."""
        first = self
        while first.continues is not None:
            first = first.continues
        return len(first.added) - len(first.response)

    def pieces(self) -> list[TokenIds]:
        """Return all its ids, prompt and response. Every id is stored once, however many calls continue from it."""
        pieces = []
        held: CachedTurn | None = self
        while held is not None:
            pieces.append(held.added)
            held = held.continues
        return pieces[::-1]


@dataclass(slots=True, eq=False)
class MessageNode:
    """A message and its predecessors; `held` is set on sampled turns.

    `given` is the message as a client last wrote it; `with_call_ids` maps the client's call ids to those of `message`.
    """

    message: Message
    parent: MessageNode | None
    outline: ConversationSkeleton
    given: Message
    held: CachedTurn | None = None
    renamed: CallIds = field(default_factory=dict)
    children: list[MessageNode] = field(default_factory=list)

    def path(self, last: int | None = None) -> list[Message]:
        """Return all messages up to this one, or the `last` of them."""
        messages: list[Message] = []
        node: MessageNode | None = self
        while node is not None and node.parent is not None and len(messages) != last:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]


class PathPosition(NamedTuple):
    """A node that a conversation passed through, the number `depth` of its messages so far, and the known call ids."""

    node: MessageNode
    depth: int
    ids: CallIds


def walk(start: PathPosition, messages: Sequence[Message]) -> list[PathPosition]:
    """Return all positions that `messages` pass through from `start` on, the deepest last."""
    positions = [start]
    reached = [start]
    for depth in range(start.depth, len(messages)):
        reached = [next_position for position in reached for next_position in _steps(position, messages[depth])]
        if not reached:
            break
        positions += reached
    return positions


def _steps(position: PathPosition, given: Message) -> list[PathPosition]:
    for child in position.node.children:
        if child.given is given:
            return [_step(position, child)]
    return [_step(position, child) for child in position.node.children if _is(child, given, position.ids)]


def _is(child: MessageNode, given: Message, ids: CallIds) -> bool:
    """Return whether the child is this message; the client's form is kept, for a quick match next time."""
    if child.given == given:
        return True
    renamed = equivalent(child.message, given, ids)
    if renamed is None:
        return False
    child.given, child.renamed = given, renamed
    return True


def _step(position: PathPosition, child: MessageNode) -> PathPosition:
    return PathPosition(child, position.depth + 1, {**position.ids, **child.renamed} if child.renamed else position.ids)
