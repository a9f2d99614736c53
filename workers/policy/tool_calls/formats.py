"""The formats by name, detection of a chat template's format, and the parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from farm.errors import InvalidRequest
from workers.policy.tool_calls import json_formats, pythonic, tagged_formats
from workers.policy.tool_calls.splitter import Grammar, Parsed, Splitter, Tags
from workers.policy.tool_calls.tagged_formats import Schemas, schemas

_GRAMMARS: Mapping[str, Grammar | Callable[[Schemas], Grammar]] = MappingProxyType(
    {
        "hermes": json_formats.HERMES,
        "qwen_xml": tagged_formats.qwen_xml,
        "llama3_json": json_formats.LLAMA3,
        "mistral": json_formats.MISTRAL,
        "deepseek": json_formats.DEEPSEEK,
        "deepseek_v32": tagged_formats.dsml,
        "pythonic": pythonic.GRAMMAR,
        "glm": tagged_formats.glm,
        "kimi_k2": json_formats.KIMI,
        "minimax_m2": tagged_formats.minimax,
        "gpt_oss": json_formats.GPT_OSS,
        "gemma4": json_formats.GEMMA,
        "none": Grammar(),
    }
)
FORMATS: tuple[str, ...] = tuple(_GRAMMARS)

_THINK = Tags("<think>", "</think>")
_BRACKETED_THINK = Tags("[THINK]", "[/THINK]")
_TAGS_OF_FORMATS = {
    "gpt_oss": (json_formats.GPT_OSS_TAGS,),
    "gemma4": (json_formats.GEMMA_TAGS,),
    "mistral": (_THINK, _BRACKETED_THINK),
}
_ALL_TAGS = (_THINK, _BRACKETED_THINK, json_formats.GPT_OSS_TAGS, json_formats.GEMMA_TAGS)

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v32", (tagged_formats.DSML,)),
    ("deepseek", (json_formats.DEEPSEEK_ALL_OPEN,)),
    ("deepseek", (json_formats.DEEPSEEK_OPEN,)),
    ("mistral", (json_formats.MISTRAL_OPEN,)),
    ("qwen_xml", (tagged_formats.QWEN_FUNCTION, "<parameter=")),
    ("minimax_m2", (tagged_formats.MINIMAX_OPEN,)),
    ("kimi_k2", (json_formats.KIMI_ALL_OPEN,)),
    ("gpt_oss", (json_formats.CHANNEL, "to=functions")),
    ("gemma4", (json_formats.GEMMA_OPEN, "call:")),
    # It has Hermes's markers, but its own syntax.
    ("glm", (tagged_formats.GLM_KEY,)),
    ("hermes", (json_formats.HERMES_OPEN,)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("llama3_json", (json_formats.PYTHON_TAG,)),
    ("llama3_json", ('"name": ', '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)
"""Pairs of a format and texts that its templates all contain; the first match counts."""


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser of an assistant turn's text, whole or as a stream, with the same result."""

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
    grammar = _GRAMMARS[chosen]
    if not isinstance(grammar, Grammar):
        grammar = grammar(schemas(tools))
    return Parser(grammar, _tags(chosen, template), opened)


def _tags(name: str, template: str) -> tuple[Tags, ...]:
    """Return the tags of reasoning; prompts open the first pair."""
    if _BRACKETED_THINK.opening in template:
        return (_BRACKETED_THINK, _THINK)
    return _TAGS_OF_FORMATS.get(name, (_THINK,))
