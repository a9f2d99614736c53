"""The conversations of one rollout as a tree: every message once, every branch held, and where a call was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farm.trajectory import Message, TokenIds
from workers.policy.tokens.meaning import CallIds, same
from workers.policy.tokens.outline import Outline


@dataclass(slots=True)
class Held:
    """A call that was answered. `continues` is the one whose ids it began with, `added` [n] its ids after those.

    `response` are the sampled ones among them, `turn` the message as it is marked in outlines.
    """

    number: int
    continues: Held | None
    added: TokenIds
    response: TokenIds
    turn: Message

    def pieces(self) -> list[TokenIds]:
        """All its ids, prompt and response. Every id is held once, however many calls go on from it."""
        pieces = []
        held: Held | None = self
        while held is not None:
            pieces.append(held.added)
            held = held.continues
        return pieces[::-1]


@dataclass(slots=True, eq=False)
class Node:
    """A message with what came before it; `held` is set on sampled turns.

    `given` is the message as a client last wrote it, `renamed` the call ids that the client has for those of `message`.
    """

    message: Message
    parent: Node | None
    outline: Outline
    given: Message
    held: Held | None = None
    renamed: CallIds = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def path(self, last: int | None = None) -> list[Message]:
        """All messages up to this one, or the `last` of them."""
        messages: list[Message] = []
        node: Node | None = self
        while node is not None and node.parent is not None and len(messages) != last:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]


def root() -> Node:
    """A tree without messages."""
    return Node({}, None, Outline(), {})


class Place(NamedTuple):
    """A node that a conversation passed through, after `depth` of its messages, and the call ids known by then."""

    node: Node
    depth: int
    ids: CallIds


def walk(start: Place, messages: Sequence[Message]) -> list[Place]:
    """All places that `messages` go through from `start` on, the deepest last."""
    places = [start]
    reached = [start]
    for depth in range(start.depth, len(messages)):
        reached = [next_place for place in reached for next_place in _steps(place, messages[depth])]
        if not reached:
            break
        places += reached
    return places


def _steps(place: Place, given: Message) -> list[Place]:
    for child in place.node.children:
        if child.given is given:
            return [_step(place, child)]
    return [_step(place, child) for child in place.node.children if _is(child, given, place.ids)]


def _is(child: Node, given: Message, ids: CallIds) -> bool:
    """Whether the child's message is meant; how the client wrote it is kept, to be known at a glance next time."""
    if child.given == given:
        return True
    renamed = same(child.message, given, ids)
    if renamed is None:
        return False
    child.given, child.renamed = given, renamed
    return True


def _step(place: Place, child: Node) -> Place:
    return Place(child, place.depth + 1, {**place.ids, **child.renamed} if child.renamed else place.ids)
