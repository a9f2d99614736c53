"""The double's responses, from its script or at random. Deterministic for a given seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from farm.records.trajectory import TokenIds, token_ids
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.hermes_text import CALL, CALL_END, THINK, THINK_END, listed_tools
from workers.testing.scripted_model import Script

_CACHE_SIZE = 1024


class TurnSource(Protocol):
    """Simulates the model."""

    def turn(self, prompt: TokenIds, seed: int | None) -> TokenIds:
        """Return all ids of the turn that follows this prompt, including its end."""


class ScriptTurns:
    """Recognises the conversation in the prompt's ids, and continues it by a script."""

    def __init__(self, vocabulary: Vocabulary, script: Script) -> None:
        self._vocabulary = vocabulary
        self._script = script
        self._ids = lru_cache(_CACHE_SIZE)(self._encode)

    def turn(self, prompt: TokenIds, seed: int | None) -> TokenIds:
        messages, begun = self._vocabulary.messages(prompt)
        begun_text = self._vocabulary.decode(begun, special=True) if len(begun) else ""
        text = self._script.next_turn(messages, seed, begun_text.rstrip("�")).text
        ids = self._ids(text)
        if np.array_equal(ids[: len(begun)], begun):
            return ids[len(begun) :]
        return self._ids(text.removeprefix(begun_text))

    def _encode(self, text: str) -> TokenIds:
        return np.append(self._vocabulary.encode(text), np.int32(self._vocabulary.end_id))


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the contents of random turns; a broken call is one of several kinds."""

    reasoning: float = 0.3
    calls: float = 0.7
    broken: float = 0.15
    split: float = 0.1
    """Share of a call's tokens that are sampled byte by byte."""


class RandomTurns:
    """Turns as of random weights: ids that differ from their text's encoding, calls of the prompt's tools.

    `mean_tokens` is the mean length of a turn's text, and also of its reasoning.
    """

    def __init__(self, vocabulary: Vocabulary, *, seed: int = 0, mean_tokens: int = 48, mix: Mix | None = None) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._mean_tokens = mean_tokens
        self._mix = mix or Mix()
        self._tools = lru_cache(_CACHE_SIZE)(listed_tools)

    def turn(self, prompt: TokenIds, seed: int | None) -> TokenIds:
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
        draw = np.random.default_rng(
            [self._seed, 0 if seed is None else seed % 2**63 + 1, int.from_bytes(digest, "little")]
        )
        parts = [self._plain(draw)]
        if draw.random() < self._mix.reasoning:
            parts = [self._mark(THINK), self._plain(draw), self._mark(THINK_END), *parts]
        tools = self._tools(self._first(prompt)) if draw.random() < self._mix.calls else ()
        if tools:
            parts.append(self._call(tools[draw.integers(len(tools))], draw))
        return np.concatenate([*parts, token_ids([self._vocabulary.end_id])])

    def _first(self, prompt: TokenIds) -> str:
        """Return the prompt's first message, which lists the tools."""
        ends = np.flatnonzero(prompt == self._vocabulary.end_id)
        messages, _ = self._vocabulary.messages(prompt[: ends[0] + 1] if len(ends) else prompt[:0])
        return str(messages[0]["content"]) if messages else ""

    def _plain(self, draw: np.random.Generator) -> TokenIds:
        n = draw.geometric(1.0 / self._mean_tokens)
        return draw.integers(0, self._vocabulary.n_plain, n, np.int32)

    def _mark(self, text: str) -> TokenIds:
        return token_ids([self._vocabulary.id_of(text)])

    def _call(self, tool: dict[str, Any], draw: np.random.Generator) -> TokenIds:
        body = json.dumps({"name": tool["name"], "arguments": self._arguments(tool, draw)}, ensure_ascii=False)
        text = f"{CALL}\n{body}\n{CALL_END}"
        if draw.random() < self._mix.broken:
            text = _broken(text, tool["name"], int(draw.integers(4)))
        return self._split(self._vocabulary.encode(text), draw)

    def _arguments(self, tool: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
        schema = tool.get("parameters") or {}
        properties = schema.get("properties") or {}
        return {name: self._value(properties.get(name, {}), draw) for name in schema.get("required") or properties}

    def _value(self, schema: dict[str, Any], draw: np.random.Generator) -> Any:
        if "enum" in schema:
            return schema["enum"][draw.integers(len(schema["enum"]))]
        kind = schema.get("type", "string")
        if kind == "string":
            return self._vocabulary.decode(draw.integers(0, self._vocabulary.n_plain, 8, np.int32))
        plain: dict[str, Any] = {"integer": int(draw.integers(100)), "number": 0.5, "boolean": True, "array": []}
        return plain.get(kind, {})

    def _split(self, ids: TokenIds, draw: np.random.Generator) -> TokenIds:
        """Return the ids with some replaced by their bytes: the same text, split differently."""
        chosen = (draw.random(len(ids)) < self._mix.split) & (ids < self._vocabulary.n_plain)
        parts = np.split(ids, np.flatnonzero(chosen))
        known = self._vocabulary
        whole = [
            part
            if not index
            else np.concatenate([[known.byte_ids[byte] for byte in known.bytes_of[part[0]]], part[1:]])
            for index, part in enumerate(parts)
        ]
        return token_ids(np.concatenate(whole))


def _broken(text: str, name: str, kind: int) -> str:
    if kind == 0:
        return text.replace("}", "", 1)
    if kind == 1:
        return text[: len(text) * 2 // 3]
    if kind == 2:
        return text.replace(json.dumps(name), '"no_such_tool"', 1)
    return f'{CALL}\n{{"name": {json.dumps(name)}}}\n{CALL_END}'
