"""The formats by name, which of them a chat template asks for, and a parser of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from farm.errors import InvalidRequest
from workers.policy.parsing import deepseek, hermes, llama3_json, mistral, pythonic, qwen_xml
from workers.policy.parsing.schemas import Schemas, schemas
from workers.policy.parsing.splitter import Grammar, Parsed, Splitter, Tags

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
    # these have markers like others' and a syntax of their own
    ("none", ("<arg_key>",)),
    ("none", ("<|tool_calls_section_begin|>",)),
    ("hermes", (hermes.OPEN,)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("llama3_json", (llama3_json.OPEN,)),
    ("llama3_json", ('"name": ', '"parameters": ')),
    ("pythonic", ("<|python_start|>",)),
)
"""A format, and what a template that shows it contains, all of it; the first that fits."""


class Parser(Protocol):
    """Takes the text of one assistant turn apart; the whole at once, or as it comes. Both give the same."""

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
    """The format that a chat template shows its model; `none` if it shows none of those spoken here."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with an open reasoning tag, so that what is sampled begins as reasoning."""
    return prompt.rstrip().endswith((_THINK.opening, _BRACKETED_THINK.opening))


def parser(name: str, *, template: str = "", opened: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
    """A parser of the named format; of the template's own if there is no name. Raises InvalidRequest for another name.

    `opened`: the prompt ended inside an open reasoning tag. `tools`, as the OpenAI API describes them, give types to
    values that a format writes as plain text.
    """
    chosen = name or detect(template)
    if chosen not in _GRAMMARS:
        raise InvalidRequest(f"there is no tool format {chosen!r}: take one of {', '.join(FORMATS)}")
    return _Parser(_GRAMMARS[chosen](schemas(tools)), _tags(chosen, template), opened)


def _tags(name: str, template: str) -> tuple[Tags, ...]:
    """The tags of reasoning; the first pair is that which a prompt opens."""
    if _BRACKETED_THINK.opening in template:
        return (_BRACKETED_THINK, _THINK)
    return (_THINK, _BRACKETED_THINK) if name == "mistral" else (_THINK,)
