"""The conversations of one rollout with one model, as ids: what was sampled is held, only what is new is encoded.

A prompt that continues a held call is that call's ids, prompt and response, and the ids of what the chat template puts
after them. Where the template would put something else in their place (it drops earlier reasoning, moves the tools), no
such prompt exists: the conversation is rendered anew as a segment of its own, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from farm.trajectory import Message, TokenIds, token_ids
from workers.policy.tokens.framing import Framing, Suffix, Tools
from workers.policy.tokens.meaning import renamed
from workers.policy.tokens.messages import text_of
from workers.policy.tokens.outline import marked, outlined_tools
from workers.policy.tokens.suffixes import suffix_after
from workers.policy.tokens.tokenizer import ModelText
from workers.policy.tokens.tree import Held, Node, Place, root, walk

FIRST = "first"
# A stop string is not longer than this.
_TAIL_IDS = 64
_TAIL_CHARS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to sample from. `continues` is the number of the call whose ids it begins with; None if there is none.

    `begins` says why it starts a segment: `first`, `branch: …` where it continues no held call, `rewritten: …` where
    the template rewrites the call it continues; empty if it continues one. The first `n_held` ids are that call's.
    """

    ids: TokenIds
    continues: int | None
    begins: str
    n_held: int
    at: Node = field(repr=False)
    tools: Tools = field(repr=False)
    held: Held | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Tree:
    """All conversations with the same tools; `answered` once a call was."""

    tools: Tools
    outlined: Tools
    start: Node = field(default_factory=root)
    answered: bool = False


class TokenSession:
    """The token side of one rollout; holds all its branches. Not for several threads at once.

    `template_kwargs` are variables of the template, such as `enable_thinking`. With `keep_rewritten`, held ids are
    continued even where the template would rewrite them, as long as it is clear what to put after them.
    """

    def __init__(
        self, text: ModelText, *, template_kwargs: Mapping[str, Any] | None = None, keep_rewritten: bool = False
    ) -> None:
        self._template = text.template
        self._tokenizer = text.tokenizer
        # A conversation keeps the date that it began with: its first ids hold it.
        self._framing = Framing(text, template_kwargs or {}, datetime.now())
        self._keep_rewritten = keep_rewritten
        self._trees: list[_Tree] = []
        self._n_taken = 0

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """The ids to sample the next turn from. TemplateError if the template refuses the conversation."""
        tree = self._tree(tools)
        places = walk(Place(tree.start, 0, {}), messages)
        held = _last_held(places, messages)
        if held is not None:
            return self._continued(tree, held, messages)
        at = self._grown(tree, places[-1], messages)
        return self._whole(tree, at, self._branch(tree, places[-1], messages) if self._n_taken else FIRST)

    def took(self, prompt: Prompt, response_ids: TokenIds, message: Message) -> int:
        """Hold what was sampled from a prompt, and the message it was parsed to. Returns the call's number."""
        ready = self._template.prepare(message, prompt.tools)
        added = np.concatenate([prompt.ids[prompt.n_held :], token_ids(response_ids)])
        response = added[len(added) - len(response_ids) :]
        held = Held(self._n_taken, prompt.held, added, response, marked(ready))
        prompt.at.children.append(Node(message, prompt.at, prompt.at.outline.then(ready), message, held))
        self._tree(prompt.tools).answered = True
        self._n_taken += 1
        return held.number

    def _tree(self, tools: Tools) -> _Tree:
        for tree in self._trees:
            if tree.tools is tools or list(tree.tools) == list(tools):
                return tree
        self._trees.append(_Tree(tools, outlined_tools(tools)))
        return self._trees[-1]

    def _grown(self, tree: _Tree, start: Place, messages: Sequence[Message]) -> Node:
        """The node of the whole conversation; what is new of it after `start` is added."""
        place = walk(start, messages)[-1]
        node = place.node
        for given in messages[place.depth :]:
            message = renamed(given, place.ids)
            node.children.append(
                Node(message, node, node.outline.then(self._template.prepare(message, tree.tools)), given)
            )
            node = node.children[-1]
        return node

    def _whole(self, tree: _Tree, at: Node, begins: str) -> Prompt:
        text = self._template.render(at.path(), tree.tools, generation_prompt=True, **self._framing.kwargs)
        return Prompt(self._tokenizer.encode(text), None, begins, 0, at, tree.tools)

    def _branch(self, tree: _Tree, place: Place, messages: Sequence[Message]) -> str:
        if messages and messages[-1].get("role") == "assistant":
            return "branch: the last message is the assistant's"
        if not tree.answered:
            return "branch: no earlier call had these tools"
        if place.depth == len(messages):
            return "branch: the same was asked before"
        if place.depth == 0:
            return "branch: another conversation"
        return f"branch: message {place.depth} ({messages[place.depth].get('role')}) is not one of an earlier call"

    def _continued(self, tree: _Tree, place: Place, messages: Sequence[Message]) -> Prompt:
        held = place.node.held
        assert held is not None
        at = self._grown(tree, place, messages)
        new = [self._template.prepare(message, tree.tools) for message in at.path(len(messages) - place.depth)]
        suffix = suffix_after(self._framing, place.node, new, tree.tools, tree.outlined)
        if not suffix.found or (suffix.rewritten and not self._keep_rewritten):
            return self._whole(
                tree, at, f"rewritten: {suffix.rewritten or 'where the last turn ends is not to be seen'}"
            )
        pieces = [*held.pieces(), self._suffix_ids(suffix, place.node, held)]
        ids = np.concatenate(pieces)
        return Prompt(ids, held.number, "", len(ids) - len(pieces[-1]), at, tree.tools, held)

    def _suffix_ids(self, suffix: Suffix, node: Node, held: Held) -> TokenIds:
        """The ids of a suffix; of its end of turn only where the policy has not sampled one, whichever one."""
        tokenizer = self._tokenizer
        if not suffix.end:
            return tokenizer.encode_within(self._unsaid(suffix.text, node, held))
        end = tokenizer.id_of(suffix.end)
        ids = tokenizer.encode(suffix.text)
        if ids[0] != end:
            ids = np.concatenate([token_ids([end]), tokenizer.encode_within(suffix.text.removeprefix(suffix.end))])
        last = held.response[-1:]
        said = end in last or (not suffix.opens and tokenizer.ended(last))
        return ids[1:] if said else ids

    def _unsaid(self, text: str, node: Node, held: Held) -> str:
        """Of an end of turn that is plain text, what the policy has not sampled: a stop string may be its beginning."""
        tail = self._tokenizer.decode(self._tokenizer.body(held.response[-_TAIL_IDS:]))
        said = text_of(node.message.get("content")) or ""
        if said and not node.message.get("tool_calls") and tail.endswith(said[-_TAIL_CHARS:]):
            return text
        overlaps = (n for n in range(min(len(tail), len(text)), 0, -1) if tail.endswith(text[:n]))
        return text[next(overlaps, 0) :]


def _last_held(places: Sequence[Place], messages: Sequence[Message]) -> Place | None:
    """Where the longest held call ends that `messages` go on from; the latest of several."""
    if not messages or messages[-1].get("role") == "assistant":
        return None
    found = [(place.depth, place.node.held.number, place) for place in places if place.node.held is not None]
    found = [entry for entry in found if entry[0] < len(messages)]
    return max(found, key=lambda entry: entry[:2])[2] if found else None
