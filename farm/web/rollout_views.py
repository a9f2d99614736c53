"""Views of one rollout: its transcript, terminal, tokens and timeline; and of the samples of one instance.

Messages may have any shape, as their authors are not trusted. Token ids are shown in stretches of the same look: by
mask, weights, log-probability, or a trainer's value.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from farm.api.endpoints import Endpoints
from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.observing.timeline import spans
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Message, ModelCall, Segment
from farm.store import batches, trajectories
from farm.store.rollouts import rollouts
from farm.web.rendering import HEADERS, ROOT, arguments_of, html, reasoning_of, text_of

MOST = 20_000
"""The number of tokens of a row that a page shows."""
_LEVELS = (-0.05, -0.5, -1.5, -3.0)
"""Log-probabilities below which a token gets the next darker level."""

_DIGEST = re.compile("[0-9a-f]{64}")
MOST_SIBLINGS = 16
"""The maximum number of samples of a group that are shown side by side."""
_PROMPTS = {
    "bash": "$",
    "shell": "$",
    "sh": "$",
    "terminal": "$",
    "execute_bash": "$",
    "python": ">>>",
    "ipython": ">>>",
}
_COMMANDS = ("command", "cmd", "commands", "keystrokes", "input", "code", "script")


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its position in the row, its id, and `level`, 0 to 4 by how unlikely it was; -1 if it was not sampled.

    `figure` is a trainer's value, None without one; `shade` is -3 to 3 of it, relative to the largest of the row.
    """

    position: int
    token_id: int
    logprob: float
    level: int
    figure: float | None = None
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one kind. `version` are the weights that sampled them, None if none did."""

    kind: str
    """`prompt`, `sampled` or `observed`."""
    version: int | None
    tokens: Sequence[Token]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training row for display, without `n_left_out` tokens at its end."""

    index: int
    n_prompt: int
    n_response: int
    n_sampled: int
    versions: Sequence[int]
    untrainable: str
    mismatch: int | None
    stretches: Sequence[Stretch]
    n_left_out: int
    mean_logprob: float | None
    turn_rewards: Sequence[tuple[int, float]]


def token_row(index: int, segment: Segment, figures: NDArray[np.float32] | None = None) -> TokenRow:
    """Return a training row in stretches; `figures` are a trainer's values, one for each token of the response."""
    mask = np.concatenate([np.full(len(segment.prompt_ids), 2, np.uint8), segment.response_mask])
    ids = np.concatenate([segment.prompt_ids, segment.response_ids])
    n_prompt = len(segment.prompt_ids)
    no_version = np.full(n_prompt, NO_VERSION, np.int32)
    versions = np.concatenate([no_version, segment.policy_versions])
    logprobs = np.concatenate([np.zeros(n_prompt, np.float32), segment.response_logprobs])
    n_shown = min(len(ids), MOST)
    changes = np.flatnonzero((np.diff(mask[:n_shown]) != 0) | (np.diff(versions[:n_shown]) != 0)) + 1
    edges = [0, *changes.tolist(), n_shown] if n_shown else []
    stretches = []
    shades = None if figures is None else _shades(figures)
    for start, end in pairwise(edges):
        kind = {2: "prompt", 1: "sampled"}.get(int(mask[start]), "observed")
        version = int(versions[start])
        tokens = [
            Token(
                at,
                int(ids[at]),
                float(logprobs[at]),
                _level(float(logprobs[at])) if kind == "sampled" else -1,
                None if figures is None or at < n_prompt else float(figures[at - n_prompt]),
                0 if shades is None or at < n_prompt else int(shades[at - n_prompt]),
            )
            for at in range(start, end)
        ]
        stretches.append(Stretch(kind, None if version == NO_VERSION else version, tokens))
    sampled = segment.response_mask == 1
    known = segment.policy_versions[sampled & (segment.policy_versions != NO_VERSION)]
    return TokenRow(
        index,
        n_prompt,
        len(segment.response_ids),
        int(sampled.sum()),
        sorted({int(version) for version in known}),
        segment.untrainable,
        segment.mismatch,
        stretches,
        len(ids) - n_shown,
        float(segment.response_logprobs[sampled].mean()) if sampled.any() else None,
        segment.turn_rewards,
    )


def _shades(figures: NDArray[np.float32]) -> NDArray[np.int8]:
    """Return -3 to 3 for each value, by its share of the largest; 0 for values that are not finite."""
    finite = np.where(np.isfinite(figures), figures, np.float32(0.0))
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    return (np.sign(finite) * np.ceil(np.abs(finite) / largest * 3)).astype(np.int8)


def _level(logprob: float) -> int:
    return sum(logprob < bound for bound in _LEVELS)


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool call: the tool's name, and its arguments by name."""

    name: str
    arguments: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A message. `style` is one of the four roles; `at_s` is its time, in seconds from the first call.

    `call` is the model call that it answers, if any. `images` are the names of the artefacts of its image parts.
    """

    role: str
    style: str
    answers: str
    thought: str
    text: str
    calls: Sequence[ShownCall]
    at_s: float
    call: ModelCall | None = None
    images: Sequence[str] = ()


def conversation(calls: Sequence[ModelCall]) -> list[ShownTurn]:
    """Return all messages of some model calls, in order."""
    return list(_messages(calls))


def _messages(calls: Sequence[ModelCall]) -> Iterator[ShownTurn]:
    for call in calls:
        start = call.started_at - calls[0].started_at
        end = start + call.latency_s
        yield from (_shown(message, start) for message in call.messages)
        yield _shown(call.response, end, call)
        yield from (_shown(message, end) for message in call.observations)


def _shown(message: Mapping[str, Any], at_s: float, call: ModelCall | None = None) -> ShownTurn:
    role = str(message.get("role", "?"))
    return ShownTurn(
        role,
        role if role in ("system", "user", "assistant", "tool") else "user",
        str(message.get("tool_call_id") or ""),
        reasoning_of(dict(message)),
        text_of(message.get("content")),
        tool_calls(message),
        at_s,
        call,
        _images(message.get("content")),
    )


def _images(content: object) -> list[str]:
    """Return the names of the artefacts of a content's images; recorded messages contain their digests."""
    parts = content if isinstance(content, list) else ()
    return [
        f"{part['sha256']}.{part['media_type'].partition('/')[2]}"
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "image"
        and part.get("media_type") in ("image/png", "image/jpeg", "image/webp", "image/gif")
        and isinstance(part.get("sha256"), str)
        and _DIGEST.fullmatch(part["sha256"])
    ]


def tool_calls(message: Mapping[str, Any]) -> list[ShownCall]:
    """Return the tool calls of a message; a malformed one is shown as its text."""
    calls = message.get("tool_calls") or ()
    shown = []
    for each in calls if isinstance(calls, list | tuple) else (calls,):
        function = each.get("function") if isinstance(each, dict) else None
        if isinstance(function, dict):
            shown.append(ShownCall(str(function.get("name", "?")), arguments_of(function.get("arguments", ""))))
        else:
            shown.append(ShownCall("?", [("", str(each))]))
    return shown


class RolloutViews:
    """The views."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def transcript(self, request: Request) -> Response:
        """Show the conversation, turn by turn, with scores and artefacts."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        farm = self._endpoints.farm
        calls, timings, rewards, artefacts = await asyncio.gather(
            self._endpoints.run(farm.calls, rollout_id),
            self._endpoints.run(farm.timings, rollout_id),
            self._endpoints.run(farm.rewards, rollout_id),
            self._endpoints.run(farm.artefacts, rollout_id),
        )
        return html(
            "transcript.html",
            rollout=rollout,
            messages=conversation(calls),
            timings=timings,
            rewards=rewards,
            artefacts=artefacts,
        )

    async def tokens(self, request: Request) -> Response:
        """Show the training rows, token by token."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        rows, figures = await asyncio.gather(
            self._endpoints.run(self._segments, rollout),
            self._endpoints.run(self._endpoints.farm.annotations.of, rollout_id),
        )
        by = request.query_params.get("by", "")
        chosen = figures[int(by)] if by.isdecimal() and int(by) < len(figures) else None

        def made() -> list[TokenRow]:
            shown = [chosen.tokens if chosen is not None and chosen.row == at else None for at in range(len(rows))]
            return [token_row(at, row, each) for at, (row, each) in enumerate(zip(rows, shown, strict=True))]

        shown_rows = await self._endpoints.run(made)
        return html("tokens.html", rollout=rollout, rows=shown_rows, most=MOST, figures=figures, chosen=chosen)

    async def terminal(self, request: Request) -> Response:
        """Show the commands of the rollout and their outputs, as a terminal session for replay."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        steps = terminal_steps(await self._endpoints.run(self._endpoints.farm.calls, rollout_id))
        return html("terminal.html", rollout=rollout, steps=steps)

    async def timeline(self, request: Request) -> Response:
        """Show stages, model calls and the tools between them on a timeline."""
        rollout_id = request.path_params["id"]
        rollout = await self._rollout(rollout_id)
        farm = self._endpoints.farm
        calls, timings = await asyncio.gather(
            self._endpoints.run(farm.calls, rollout_id), self._endpoints.run(farm.timings, rollout_id)
        )
        drawn = spans(rollout, timings, calls, time.time())
        end_s = max((span.end_s for span in drawn), default=0.0)
        lanes = list(dict.fromkeys(span.lane for span in drawn))
        return html("timeline.html", rollout=rollout, spans=drawn, lanes=lanes, end_s=end_s or 1.0)

    async def group(self, request: Request) -> Response:
        """Show the samples of one instance side by side."""
        ref = RolloutRef.of(request.path_params["id"])
        if ref.kind != "group":
            raise NotFound(f"there is no group {ref}: its id is BATCH.GROUP")
        members, calls, rows = await self._endpoints.run(self._members, ref)
        samples = siblings(members, calls, rows)
        return html("group.html", group_id=str(ref), batch_id=ref.batch_id, siblings=samples, most=MOST_SIBLINGS)

    async def find(self, request: Request) -> Response:
        """Redirect to the batch, group or rollout of an id."""
        ref = RolloutRef.of(request.query_params.get("id", "").strip())
        folder = {"batch": "batches", "group": "groups", "rollout": "rollouts"}[ref.kind]
        return RedirectResponse(f"{ROOT}/{folder}/{ref}", 303, HEADERS)

    async def _rollout(self, rollout_id: str) -> Rollout:
        return await self._endpoints.run(self._endpoints.farm.rollout, rollout_id)

    def _segments(self, rollout: Rollout) -> Sequence[Segment]:
        farm = self._endpoints.farm
        ids = [rollout.rollout_id]
        rows = farm.store.read(lambda connection: trajectories.segments_of(connection, rollout.batch_id, ids))
        return rows.get(rollout.rollout_id, ())

    def _members(self, ref: RolloutRef) -> tuple[list[Rollout], list[Sequence[ModelCall]], list[Sequence[Segment]]]:
        store = self._endpoints.farm.store
        members = store.read(lambda connection: _of_group(connection, ref))
        if not members:
            raise NotFound(f"there is no group {ref}")
        ids = [each.rollout_id for each in members]
        calls: list[Sequence[ModelCall]] = [self._endpoints.farm.calls(id) for id in ids]
        rows = store.read(lambda connection: trajectories.segments_of(connection, ref.batch_id, ids))
        return members, calls, [rows.get(id, ()) for id in ids]


def _of_group(connection: Connection, ref: RolloutRef) -> list[Rollout]:
    chosen = (
        select(rollouts)
        .where(rollouts.c.batch_id == ref.batch_id, rollouts.c.group_index == ref.group_index)
        .order_by(rollouts.c.sample_index)
        .limit(MOST_SIBLINGS)
    )
    return batches.rollouts_by(connection, chosen)


@dataclass(frozen=True, slots=True)
class SiblingTurn:
    """One turn of a sample: the policy's message. `parts` is True for the first that differs from the reference's."""

    index: int
    text: str
    parts: bool


@dataclass(frozen=True, slots=True)
class Sibling:
    """One sample. Its first `common_tokens` tokens equal those of the reference; None without tokens."""

    rollout: Rollout
    turns: Sequence[SiblingTurn]
    common_tokens: int | None
    parts_at_turn: int | None


def siblings(
    rollouts: Sequence[Rollout], calls: Sequence[Sequence[ModelCall]], rows: Sequence[Sequence[Segment]]
) -> list[Sibling]:
    """Return the samples of a group; the reference is the first one with a model call."""
    reference = next((index for index, each in enumerate(calls) if each), None)
    samples = []
    for index, rollout in enumerate(rollouts):
        turns = [answer_of(call) for call in calls[index]]
        first = None
        if reference is not None and index != reference:
            others = [answer_of(call) for call in calls[reference]]
            first = next((n for n in range(len(turns)) if n >= len(others) or turns[n] != others[n]), None)
            if first is None and len(turns) < len(others) and turns:
                first = len(turns) - 1
        common = None
        if reference is not None and rows[index] and rows[reference]:
            common = _common(rows[index][0], rows[reference][0])
        shown = [SiblingTurn(n, text, n == first) for n, text in enumerate(turns)]
        samples.append(Sibling(rollout, shown, common, first))
    return samples


def answer_of(call: ModelCall) -> str:
    """Return the policy's answer in a model call, in a few lines: thoughts, text, tool calls."""
    message = call.response
    lines = [f"({reasoning})" for reasoning in [reasoning_of(message).strip()] if reasoning]
    lines += [text for text in [text_of(message.get("content")).strip()] if text]
    for each in tool_calls(message):
        arguments = ", ".join(f"{name}={value}" if name else value for name, value in each.arguments)
        lines.append(f"→ {each.name}({arguments})")
    return "\n".join(lines)


def _common(row: Segment, reference: Segment) -> int:
    if len(row.prompt_ids) != len(reference.prompt_ids) or not np.array_equal(row.prompt_ids, reference.prompt_ids):
        return 0
    n = min(len(row.response_ids), len(reference.response_ids))
    differ = np.flatnonzero(row.response_ids[:n] != reference.response_ids[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True, slots=True)
class TerminalStep:
    """A command and its output; `at_s` is when the command was written, in seconds from the first call.

    `output` is None if none was recorded: the rollout ended before, or is running.
    """

    at_s: float
    prompt: str
    command: str
    output: str | None


def terminal_steps(calls: Sequence[ModelCall]) -> list[TerminalStep]:
    """Return the tool calls of some model calls in order, with the outputs that the policy was shown."""
    results: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for number, call in enumerate(calls):
        # an agent program sends results with its next call; ids may be reused
        for after, messages in ((number - 1, call.messages), (number, call.observations)):
            for id, text in _results(messages):
                results[id].append((after, text))
    steps = []
    for number, call in enumerate(calls):
        at_s = call.started_at + call.latency_s - calls[0].started_at
        nameless = iter([text for after, text in results[""] if after == number])
        for id, shown in zip(_ids(call.response), tool_calls(call.response), strict=True):
            answers = (text for after, text in results.get(id, ()) if after >= number)
            output = next(nameless if not id else answers, None)
            steps.append(TerminalStep(at_s, _PROMPTS.get(shown.name, shown.name), _command(shown), output))
    return steps


def _results(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the id, empty if there is none, and the text of each tool result."""
    for message in messages:
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id") or ""), text_of(message.get("content"))


def _ids(message: Message) -> list[str]:
    value: Any = message.get("tool_calls") or ()
    calls = value if isinstance(value, list | tuple) else (value,)
    return [str(each.get("id") or "") if isinstance(each, dict) else "" for each in calls]


def _command(call: ShownCall) -> str:
    """Return the command line of a call: the argument that holds a command, or all arguments by name."""
    arguments = dict(call.arguments)
    name = next((each for each in _COMMANDS if each in arguments), None)
    if name is not None:
        return arguments[name]
    return "\n".join(f"{name}: {value}" if name else value for name, value in call.arguments)
