"""The conversations of one rollout as a tree: every message once, every branch, and the answered calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farm.records.trajectory import Message, TokenIds
from workers.policy.tokens.conversation_skeleton import ConversationSkeleton
from workers.policy.tokens.message_equality import CallIds, equivalent


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


def root() -> MessageNode:
    """Return a tree without messages."""
    return MessageNode({}, None, ConversationSkeleton(), {})


class PathPosition(NamedTuple):
    """A node that a conversation passed through, the number `depth` of its messages so far, and the known call ids."""

    node: MessageNode
    depth: int
    ids: CallIds


def walk(start: PathPosition, messages: Sequence[Message]) -> list[PathPosition]:
    """Return all positions that `messages` pass through from `start` on, the deepest last."""
    places = [start]
    reached = [start]
    for depth in range(start.depth, len(messages)):
        reached = [next_place for place in reached for next_place in _steps(place, messages[depth])]
        if not reached:
            break
        places += reached
    return places


def _steps(place: PathPosition, given: Message) -> list[PathPosition]:
    for child in place.node.children:
        if child.given is given:
            return [_step(place, child)]
    return [_step(place, child) for child in place.node.children if _is(child, given, place.ids)]


def _is(child: MessageNode, given: Message, ids: CallIds) -> bool:
    """Return whether the child is this message; the client's form is kept, for a quick match next time."""
    if child.given == given:
        return True
    renamed = equivalent(child.message, given, ids)
    if renamed is None:
        return False
    child.given, child.renamed = given, renamed
    return True


def _step(place: PathPosition, child: MessageNode) -> PathPosition:
    return PathPosition(child, place.depth + 1, {**place.ids, **child.renamed} if child.renamed else place.ids)
