"""A model's chat template, rendered as transformers renders it: the same Jinja settings, functions and variables.

A template comes from the model's publisher, so it runs in Jinja's immutable sandbox, without a loader: it gets only
plain values, reads no file and reaches no Python object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from farm.errors import FarmError
from farm.records.trajectory import Message
from workers.policy.tokens.messages import Style, prepared

DEFAULT = "default"
_DICT_ATTRIBUTES = frozenset(dir(dict))
_plain_json = json.JSONEncoder(ensure_ascii=False).encode
TOOL_USE = "tool_use"


class TemplateError(FarmError):
    """A chat template cannot be compiled, or refused a conversation."""


class ChatTemplate:
    """The template of one model. `source` is the text of its default one; with tools, `tool_use` is used.

    `sources` maps names to texts, a single text is the default one; `specials` are the special tokens as variables,
    such as `bos_token`; `name` is the model's, for messages.
    """

    def __init__(
        self, sources: str | Mapping[str, str], specials: Mapping[str, str] | None = None, name: str = ""
    ) -> None:
        by_name = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        if not by_name:
            raise TemplateError(f"{name or 'the model'} has no chat template")
        self.name = name or "the model"
        self.specials = dict(specials or {})
        self.source = by_name[DEFAULT if DEFAULT in by_name else next(iter(by_name))]
        self._plain = _Compiled(self.source, self.name)
        self._with_tools = _Compiled(by_name[TOOL_USE], self.name) if TOOL_USE in by_name else self._plain

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Return the model's input for a conversation of messages as clients write them. Raises TemplateError."""
        ready = [self.prepare(message, tools) for message in messages]
        return self.render_prepared(ready, tools, generation_prompt=generation_prompt, **kwargs)

    def prepare(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return a message in the form that the template expects."""
        return prepared(message, self._of(tools).style)

    def render_prepared(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Render messages that are already prepared by `prepare`."""
        variables = {"documents": None, **self.specials, **kwargs}
        variables |= {"messages": messages, "tools": tools or None, "add_generation_prompt": generation_prompt}
        try:
            return self._of(tools).template.render(variables)
        # A template's own mistakes raise any Python error: a missing key, a wrong type, too deep a recursion.
        except Exception as error:
            raise TemplateError(
                f"the chat template of {self.name} refused the conversation: {_message_of(error)}"
            ) from error

    def _of(self, tools: Sequence[Mapping[str, Any]]) -> _Compiled:
        return self._with_tools if tools else self._plain


class _Compiled:
    """One compiled text, and the form in which it expects messages."""

    def __init__(self, source: str, name: str) -> None:
        environment = _environment()
        try:
            self.template = environment.from_string(source)
            self.style = _style(self.template, source, environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template of {name} cannot be compiled: {_message_of(error)}") from error


def _message_of(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with faster access to values of plain dictionaries, the most frequent look-up of templates."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = clock(None)
    return environment


def clock(instant: datetime | None) -> Callable[[str], str]:
    """Return a fixed `strftime_now`, as a conversation keeps its first date; for None, one of the current time."""
    return lambda pattern: (instant or datetime.now()).strftime(pattern)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models have never seen.
    if not (ensure_ascii or indent or separators or sort_keys):
        return _plain_json(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which some templates mark the trained part: renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _style(template: jinja2.Template, source: str, tree: nodes.Template) -> Style:
    style = Style(
        parts=_loops_over_content(tree)
        and not re.search(r"\bis\s+(not\s+)?(string|iterable|sequence|mapping)\b", source),
        none=re.search(r"content['\"]?\]?\s*(is\s+(not\s+)?none|[!=]=\s*none)", source, re.IGNORECASE) is not None,
        short_ids=re.search(r"id\s*\|\s*length\s*!=\s*9|id\)?\s*\|\s*length\s*<\s*9", source) is not None,
    )
    # Some templates concatenate arguments with text, which fails with objects; they get the original text.
    as_text = replace(style, text_arguments=True)
    return as_text if not _takes_calls(template, style) and _takes_calls(template, as_text) else style


def _takes_calls(template: jinja2.Template, style: Style) -> bool:
    function = {"name": "probe", "arguments": '{"value": 1}'}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "probe0001", "function": function}]},
    ]
    try:
        template.render(messages=[prepared(message, style) for message in messages], tools=None, bos_token="")
    # Any error means that the template does not accept them.
    except Exception:
        return False
    return True


def _loops_over_content(tree: nodes.Template) -> bool:
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
