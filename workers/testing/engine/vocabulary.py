"""Token ids and text, for the double's own use: reading prompts, rendering messages, showing tokens.

It is independent of the farm's tokenizing, which is tested against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from farm.records.trajectory import Message, TokenIds, token_ids
from workers.testing.engine.model_text import END, END_OF_TEXT, MARKS, SPECIAL_TOKENS, START, template
from workers.testing.hermes_text import message_of

_CACHE_SIZE = 4096


class Vocabulary:
    """Everything that the tokenizer and the template determine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        self.start_id, self.end_id, self.end_of_text_id = map(self.id_of, (START, END, END_OF_TEXT))
        self.end_ids = frozenset((self.end_id, self.end_of_text_id))
        self.n_plain = self.size - len(SPECIAL_TOKENS) - len(MARKS)
        """Ids below are bytes and merges."""
        self.bytes_of = tuple(_token_bytes(tokenizer.id_to_token(id_) or "") for id_ in range(self.size))
        self.byte_ids = {self.bytes_of[id_][0]: id_ for id_ in range(self.n_plain) if len(self.bytes_of[id_]) == 1}
        self.shown_as = tuple(_shown(data) for data in self.bytes_of)
        """The text of each token; empty for parts of a character, as in vLLM."""
        self._render = _renderer()
        self._message = lru_cache(_CACHE_SIZE)(self._read_message)

    def id_of(self, token: str) -> int:
        token_id: int | None = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def encode(self, text: str) -> TokenIds:
        return token_ids(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: TokenIds, *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=not special)
        return text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text. Raises jinja2's TemplateError, or any error of rendering an invalid message."""
        return self._render.render(
            messages=messages, tools=list(tools) or None, add_generation_prompt=generation_prompt, **kwargs
        )

    def messages(self, prompt: TokenIds) -> tuple[list[Message], TokenIds]:
        """Return the complete messages of a prompt, and the ids of the assistant's next message so far."""
        starts = np.flatnonzero(prompt == self.start_id)
        bounds = [*starts.tolist(), len(prompt)]
        parts = [prompt[begin:end] for begin, end in pairwise(bounds)]
        if not parts or self.end_id in parts[-1]:
            return [self._message(part.tobytes()) for part in parts], prompt[:0]
        head = self.encode(f"{START}assistant\n")
        begun = parts[-1][len(head) :] if np.array_equal(parts[-1][: len(head)], head) else parts[-1][1:]
        return [self._message(part.tobytes()) for part in parts[:-1]], begun

    def _read_message(self, data: bytes) -> Message:
        ids = np.frombuffer(data, np.int32)
        ends = np.flatnonzero(ids == self.end_id)
        text = self.decode(ids[1 : ends[0] if len(ends) else len(ids)], special=True)
        role, _, content = text.partition("\n")
        return message_of(content) if role == "assistant" else {"role": role, "content": content}


def _token_bytes(token: str) -> bytes:
    """Return the bytes of a token: byte-level tokenizers write each as a printable character."""
    if token in (*SPECIAL_TOKENS, *MARKS):
        return token.encode()
    return bytes(_BYTES[character] for character in token)


def _shown(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""


def _byte_characters() -> dict[str, int]:
    """Printable bytes stand for themselves: https://github.com/openai/gpt-2/blob/master/src/encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def _renderer() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template())
