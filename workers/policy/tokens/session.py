"""The conversations of one rollout with one model, as ids: sampled ids are kept, and only new text is encoded.

A prompt that continues a held call consists of that call's ids, prompt and response, and the ids of the text that the
chat template puts after them. If the template would change the held text (it drops earlier reasoning, moves the tools),
no such prompt exists: the conversation is rendered from scratch as a new segment, and the reason is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from farm.records.trajectory import Message, TokenIds, token_ids
from workers.policy.tokens.conversation_skeleton import ConversationSkeleton, marked, outlined_tools
from workers.policy.tokens.conversation_tree import CachedTurn, MessageNode, PathPosition, walk, with_call_ids
from workers.policy.tokens.messages import text_of
from workers.policy.tokens.tokenizer import ModelText
from workers.policy.tokens.turn_suffix import Tools, TurnSuffix, TurnSuffixes, suffix_after

FIRST = "first"
# Maximum length of a stop string.
_TAIL_IDS = 64
_TAIL_CHARS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to sample from. `continues` is the number of the call whose ids it begins with; None if there is none.

    `begins` is the reason for a new segment: `first`; `branch: …` if it continues no held call; `rewritten: …` if the
    template rewrites the call that it continues; empty for no new segment. The first `n_held` ids are that call's.
    """

    ids: TokenIds
    continues: int | None
    begins: str
    n_held: int
    at: MessageNode = field(repr=False)
    tools: Tools = field(repr=False)
    held: CachedTurn | None = field(default=None, repr=False)

    @property
    def n_first(self) -> int:
        """The number of ids of its segment's first prompt."""
        return len(self.ids) if self.held is None else self.held.n_first_prompt


@dataclass(frozen=True, slots=True)
class PromptDraft:
    """A prompt whose text of `n_chars` is not yet encoded. Any thread may encode it: that touches no conversation."""

    n_chars: int
    encode: Callable[[], Prompt]


@dataclass(slots=True)
class _Tree:
    """All conversations with the same tools; `answered` is True once a call was answered."""

    tools: Tools
    outlined: Tools
    start: MessageNode = field(default_factory=lambda: MessageNode({}, None, ConversationSkeleton(), {}))
    answered: bool = False


class TokenSession:
    """The token side of one rollout with all its branches. Not thread-safe, except for drafts.

    `template_kwargs` are variables of the template, such as `enable_thinking`. With `keep_rewritten`, held ids are
    continued even if the template would rewrite them, as long as the text after them is unambiguous.
    """

    def __init__(
        self, text: ModelText, *, template_kwargs: Mapping[str, Any] | None = None, keep_rewritten: bool = False
    ) -> None:
        self._template = text.template
        self._tokenizer = text.tokenizer
        # A conversation keeps the date of its beginning: its first ids contain it.
        self._framing = TurnSuffixes(text, template_kwargs or {}, datetime.now())
        self._keep_rewritten = keep_rewritten
        self._trees: list[_Tree] = []
        self._n_taken = 0

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Return the ids to sample the next turn from. Raises TemplateError if the template refuses them."""
        return self.draft(messages, tools).encode()

    def draft(self, messages: Sequence[Message], tools: Tools) -> PromptDraft:
        """Return the next turn's prompt, not yet encoded. Raises TemplateError if the template refuses the messages."""
        tree = self._tree(tools)
        positions = walk(PathPosition(tree.start, 0, {}), messages)
        held = _last_held(positions, messages)
        if held is not None:
            return self._continued(tree, held, messages)
        at = self._grown(tree, positions[-1], messages)
        return self._whole(tree, at, self._branch(tree, positions[-1], messages) if self._n_taken else FIRST)

    def commit(self, prompt: Prompt, response_ids: TokenIds, message: Message) -> int:
        """Store the ids sampled from a prompt and the message parsed from them. Return the call's number."""
        ready = self._template.prepare(message, prompt.tools)
        added = np.concatenate([prompt.ids[prompt.n_held :], token_ids(response_ids)])
        response = added[len(added) - len(response_ids) :]
        held = CachedTurn(self._n_taken, prompt.held, added, response, marked(ready))
        prompt.at.children.append(MessageNode(message, prompt.at, prompt.at.outline.then(ready), message, held))
        self._tree(prompt.tools).answered = True
        self._n_taken += 1
        return held.number

    def _tree(self, tools: Tools) -> _Tree:
        for tree in self._trees:
            if tree.tools is tools or list(tree.tools) == list(tools):
                return tree
        self._trees.append(_Tree(tools, outlined_tools(tools)))
        return self._trees[-1]

    def _grown(self, tree: _Tree, start: PathPosition, messages: Sequence[Message]) -> MessageNode:
        """Return the node of the whole conversation; new messages after `start` are added."""
        position = walk(start, messages)[-1]
        node = position.node
        for given in messages[position.depth :]:
            message = with_call_ids(given, position.ids)
            node.children.append(
                MessageNode(message, node, node.outline.then(self._template.prepare(message, tree.tools)), given)
            )
            node = node.children[-1]
        return node

    def _whole(self, tree: _Tree, at: MessageNode, begins: str) -> PromptDraft:
        text = self._template.render(at.path(), tree.tools, generation_prompt=True, **self._framing.kwargs)
        return PromptDraft(len(text), lambda: Prompt(self._tokenizer.encode(text), None, begins, 0, at, tree.tools))

    def _branch(self, tree: _Tree, position: PathPosition, messages: Sequence[Message]) -> str:
        if messages and messages[-1].get("role") == "assistant":
            return "branch: the last message is the assistant's"
        if not tree.answered:
            return "branch: no earlier call had these tools"
        if position.depth == len(messages):
            return "branch: the same was asked before"
        if position.depth == 0:
            return "branch: another conversation"
        return (
            f"branch: message {position.depth} ({messages[position.depth].get('role')}) is not one of an earlier call"
        )

    def _continued(self, tree: _Tree, position: PathPosition, messages: Sequence[Message]) -> PromptDraft:
        held = position.node.held
        assert held is not None
        at = self._grown(tree, position, messages)
        new = [self._template.prepare(message, tree.tools) for message in at.path(len(messages) - position.depth)]
        suffix = suffix_after(self._framing, position.node, new, tree.tools, tree.outlined)
        if not suffix.found or (suffix.rewritten and not self._keep_rewritten):
            return self._whole(
                tree, at, f"rewritten: {suffix.rewritten or 'where the last turn ends is not to be seen'}"
            )
        return PromptDraft(len(suffix.text), partial(self._extended, suffix, position.node, held, at, tree.tools))

    def _extended(
        self, suffix: TurnSuffix, node: MessageNode, held: CachedTurn, at: MessageNode, tools: Tools
    ) -> Prompt:
        pieces = [*held.pieces(), self._suffix_ids(suffix, node, held)]
        ids = np.concatenate(pieces)
        return Prompt(ids, held.number, "", len(ids) - len(pieces[-1]), at, tools, held)

    def _suffix_ids(self, suffix: TurnSuffix, node: MessageNode, held: CachedTurn) -> TokenIds:
        """Return a suffix's ids, without its end of turn if the policy sampled any end of turn."""
        tokenizer = self._tokenizer
        if not suffix.end:
            return tokenizer.encode_within(self._unsampled(suffix.text, node, held))
        end = tokenizer.id_of(suffix.end)
        ids = tokenizer.encode(suffix.text)
        if ids[0] != end:
            ids = np.concatenate([token_ids([end]), tokenizer.encode_within(suffix.text.removeprefix(suffix.end))])
        last = held.response[-1:]
        is_sampled = end in last or (not suffix.opens and tokenizer.ended(last))
        return ids[1:] if is_sampled else ids

    def _unsampled(self, text: str, node: MessageNode, held: CachedTurn) -> str:
        """Return the unsampled part of a plain-text end of turn: a stop string may be its beginning."""
        tail = self._tokenizer.decode(self._tokenizer.body(held.response[-_TAIL_IDS:]))
        answer = text_of(node.message.get("content")) or ""
        if answer and not node.message.get("tool_calls") and tail.endswith(answer[-_TAIL_CHARS:]):
            return text
        overlaps = (n for n in range(min(len(tail), len(text)), 0, -1) if tail.endswith(text[:n]))
        return text[next(overlaps, 0) :]


def _last_held(positions: Sequence[PathPosition], messages: Sequence[Message]) -> PathPosition | None:
    """Return the end position of the longest held call that `messages` continue; the latest of several."""
    if not messages or messages[-1].get("role") == "assistant":
        return None
    candidates = [
        (position.depth, position.node.held.number, position)
        for position in positions
        if position.node.held is not None
    ]
    candidates = [entry for entry in candidates if entry[0] < len(messages)]
    return max(candidates, key=lambda entry: entry[:2])[2] if candidates else None
