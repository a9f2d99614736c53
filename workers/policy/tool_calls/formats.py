"""The formats by name, detection of a chat template's format, and the parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from farm.errors import InvalidRequest
from workers.policy.tool_calls import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    hermes,
    invoke_xml,
    kimi,
    llama3_json,
    mistral,
    pythonic,
    qwen_xml,
)
from workers.policy.tool_calls.parameter_schemas import Schemas, schemas
from workers.policy.tool_calls.splitter import Grammar, Parsed, Splitter, Tags

_GRAMMARS: Mapping[str, Callable[[Schemas], Grammar]] = MappingProxyType(
    {
        "hermes": hermes.grammar,
        "qwen_xml": qwen_xml.grammar,
        "llama3_json": llama3_json.grammar,
        "mistral": mistral.grammar,
        "deepseek": deepseek.grammar,
        "deepseek_v32": invoke_xml.dsml_grammar,
        "pythonic": pythonic.grammar,
        "glm": glm.grammar,
        "kimi_k2": kimi.grammar,
        "minimax_m2": invoke_xml.minimax_grammar,
        "gpt_oss": gpt_oss.grammar,
        "gemma4": gemma.grammar,
        "none": lambda known: Grammar(),
    }
)
FORMATS: tuple[str, ...] = tuple(_GRAMMARS)

_THINK = Tags("<think>", "</think>")
_BRACKETED_THINK = Tags("[THINK]", "[/THINK]")
_TAGS_OF_FORMATS = {"gpt_oss": (gpt_oss.TAGS,), "gemma4": (gemma.TAGS,), "mistral": (_THINK, _BRACKETED_THINK)}
_ALL_TAGS = (_THINK, _BRACKETED_THINK, gpt_oss.TAGS, gemma.TAGS)

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v32", (invoke_xml.DSML,)),
    ("deepseek", (deepseek.ALL_OPEN,)),
    ("deepseek", (deepseek.OPEN,)),
    ("mistral", (mistral.OPEN,)),
    ("qwen_xml", (qwen_xml.FUNCTION, "<parameter=")),
    ("minimax_m2", (invoke_xml.MINIMAX_OPEN,)),
    ("kimi_k2", (kimi.ALL_OPEN,)),
    ("gpt_oss", (gpt_oss.CHANNEL, "to=functions")),
    ("gemma4", (gemma.OPEN, "call:")),
    # It has Hermes's markers, but its own syntax.
    ("glm", (glm.KEY,)),
    ("hermes", (hermes.OPEN,)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("llama3_json", (llama3_json.OPEN,)),
    ("llama3_json", ('"name": ', '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)
"""Pairs of a format and texts that its templates all contain; the first match counts."""


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
    """Return the format that a chat template shows its model; `none` for an unsupported one."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends inside an open reasoning tag: the sampled text then begins as reasoning."""
    return prompt.rstrip().endswith(tuple(tags.opening.rstrip() for tags in _ALL_TAGS))


def parser(name: str, *, template: str = "", opened: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
    """Return a parser of the named format; an empty `name` uses the template's own. Raises InvalidRequest for others.

    `opened`: the prompt ended inside an open reasoning tag. `tools`, in the form of the OpenAI API, define the types of
    values that a format writes as plain text.
    """
    chosen = name or detect(template)
    if chosen not in _GRAMMARS:
        raise InvalidRequest(f"unknown tool format {chosen!r}: use one of {', '.join(FORMATS)}")
    return _Parser(_GRAMMARS[chosen](schemas(tools)), _tags(chosen, template), opened)


def _tags(name: str, template: str) -> tuple[Tags, ...]:
    """Return the tags of reasoning; prompts open the first pair."""
    if _BRACKETED_THINK.opening in template:
        return (_BRACKETED_THINK, _THINK)
    return _TAGS_OF_FORMATS.get(name, (_THINK,))
