"""The formats by name, detection of a chat template's format, and the parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from farm.errors import InvalidRequest
from workers.policy.tool_calls import deepseek, hermes, llama3_json, mistral, pythonic, qwen_xml
from workers.policy.tool_calls.parameter_schemas import Schemas, schemas
from workers.policy.tool_calls.splitter import Grammar, Parsed, Splitter, Tags

_GRAMMARS: Mapping[str, Callable[[Schemas], Grammar]] = MappingProxyType(
    {
        "hermes": hermes.grammar,
        "qwen_xml": qwen_xml.grammar,
        "llama3_json": llama3_json.grammar,
        "mistral": mistral.grammar,
        "deepseek": deepseek.grammar,
        "pythonic": pythonic.grammar,
        "none": lambda known: Grammar(),
    }
)
FORMATS: tuple[str, ...] = tuple(_GRAMMARS)

_THINK = Tags("<think>", "</think>")
_BRACKETED_THINK = Tags("[THINK]", "[/THINK]")

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek", (deepseek.ALL_OPEN,)),
    ("deepseek", (deepseek.OPEN,)),
    ("mistral", (mistral.OPEN,)),
    ("qwen_xml", (qwen_xml.FUNCTION, "<parameter=")),
    # these have markers like those of other formats, and a syntax of their own
    ("none", ("<arg_key>",)),
    ("none", ("<|tool_calls_section_begin|>",)),
    ("hermes", (hermes.OPEN,)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("llama3_json", (llama3_json.OPEN,)),
    ("llama3_json", ('"name": ', '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)
"""Pairs of a format and the texts that its templates contain, all of them; the first match counts."""


class Parser(Protocol):
    """A parser of an assistant turn's text, whole or as a stream, with the same result."""

    def parse(self, text: str) -> Parsed: ...

    def stream(self) -> Splitter: ...


@dataclass(frozen=True, slots=True)
class _Parser:
    grammar: Grammar
    tags: tuple[Tags, ...]
    opened: bool

    def parse(self, text: str) -> Parsed:
        splitter = self.stream()
        splitter.feed(text)
        splitter.end()
        return splitter.parsed()

    def stream(self) -> Splitter:
        return Splitter(self.grammar, self.tags, self.opened)


def detect(template: str) -> str:
    """Return the format that a chat template shows its model; `none` if it is none of those supported."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with an open reasoning tag: the sampled text then begins as reasoning."""
    return prompt.rstrip().endswith((_THINK.opening, _BRACKETED_THINK.opening))


def parser(name: str, *, template: str = "", opened: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
    """Return a parser of the named format; of the template's own if `name` is empty. Raises InvalidRequest for others.

    `opened`: the prompt ended inside an open reasoning tag. `tools`, as the OpenAI API describes them, give types to
    values that a format writes as plain text.
    """
    chosen = name or detect(template)
    if chosen not in _GRAMMARS:
        raise InvalidRequest(f"there is no tool format {chosen!r}: take one of {', '.join(FORMATS)}")
    return _Parser(_GRAMMARS[chosen](schemas(tools)), _tags(chosen, template), opened)


def _tags(name: str, template: str) -> tuple[Tags, ...]:
    """Return the tags of reasoning; the first pair is the one that a prompt opens."""
    if _BRACKETED_THINK.opening in template:
        return (_BRACKETED_THINK, _THINK)
    return (_THINK, _BRACKETED_THINK) if name == "mistral" else (_THINK,)
