# ruff: noqa: RUF001, RUF002
"""Formats of tool calls with a name, and a tag for each parameter with its value as plain text: one reader for all.

A value ends at the first closing tag followed by another parameter or the end of the call; any other closing tag in it
is text. A value that contains an opening tag has lost its own closing tag, or contains a pair of tags as text: the two
cases cannot be distinguished, so such a call is malformed. So is one that names a parameter twice, or is cut off by the
end of the text, as more parameters might have followed. Types of values follow from the tool's schema, if known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from workers.policy.tool_calls.scanner import Delimited, Quotes, enclosed
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tool_call import UNREADABLE, ParsedToolCall, malformed

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Tool to parameter to its JSON schema."""

_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}


def schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameter schemas of tools as the OpenAI API describes them."""
    functions = [tool.get("function") or {} for tool in tools]
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


def as_json(value: str, schema: Mapping[str, Any] | None) -> str:
    """Return the JSON text of a parameter that was written as plain text.

    With a schema, a value that may be a string is one, and any other is parsed if it is JSON. Without, only objects and
    arrays are parsed: a tool that expects a number accepts it as a string, but not vice versa.
    """
    kinds = _kinds(schema) if schema is not None else set()
    bare = value.strip()
    if "string" in kinds:
        return "null" if "null" in kinds and bare == "null" else _string(value)
    if not kinds:
        return bare if bare.startswith(("{", "[")) and _is_json(bare) else _string(value)
    if bare in _WORDS:
        return _WORDS[bare]
    return bare if _is_json(bare) else _string(value)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(choice)
    return kinds


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except UNREADABLE:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _TaggedParameters:
    """One variant. `head` matches up to the first parameter, its group 1 is the tool's name. `parameter` matches the
    opening tag: group 1 is the name; a group `string` of `true` makes the value text whatever the schema says.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    opening: str
    """The beginning of `parameter`'s matches."""
    closing: str
    end: str = ""
    """The optional tag after the last parameter."""
    value: str = ""
    """The tag before the value, if it is not that of `opening`."""
    wrapped: bool = False
    """True if a value loses one line break at each end."""

    @property
    def _quotes(self) -> Quotes:
        """Return the quotes that keep markers in values from ending the call; another parameter shows them unpaired."""
        return Quotes(self.value or self.opening, self.closing, broken=(self.opening,))

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags that occur only in calls."""
        return tuple(filter(None, (self.opening, self.value, self.closing)))

    def region(
        self, schemas: Schemas, closer: str, stops: Sequence[str], before: str = ""
    ) -> Callable[[bool], Delimited]:
        """Return a factory of the region of a call up to `closer`; `before` is its part that the opener took."""
        return enclosed(
            lambda raw: [self._call(before + raw, schemas)],
            closer,
            stops,
            self._quotes,
            lambda raw: [self._unfinished(before + raw, schemas)],
        )

    def _call(self, raw: str, schemas: Schemas) -> ParsedToolCall:
        head = self.head.match(raw)
        name = head.group(1).strip() if head else ""
        if head is None or not name:
            return malformed(raw)
        known = schemas.get(name, {})
        values: dict[str, str] = {}
        at = head.end()
        follows = "|".join(re.escape(each) for each in (self.opening, self.end) if each)
        value_end = re.compile(rf"{re.escape(self.closing)}\s*(?={follows}|\Z)")
        while (parameter := self.parameter.match(raw, at)) is not None:
            end = value_end.search(raw, parameter.end())
            key = parameter.group(1).strip()
            if end is None or key in values:
                return malformed(raw, name)
            value = raw[parameter.end() : end.start()]
            if self.opening in value:
                return malformed(raw, name)
            values[key] = _as_json(self._unwrapped(value), parameter, known.get(key))
            at = end.end()
        if raw[at:].strip() not in {"", self.end}:
            return malformed(raw, name)
        members = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        return ParsedToolCall(name, f"{{{members}}}")

    def _unfinished(self, raw: str, schemas: Schemas) -> ParsedToolCall:
        """Return the call of a region without an end: it is complete only if its own last tag is there."""
        if self.end and raw.rstrip().endswith(self.end):
            return self._call(raw, schemas)
        head = self.head.match(raw)
        return malformed(raw, head.group(1).strip() if head else "")

    def _unwrapped(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.wrapped else value


def _as_json(value: str, parameter: re.Match[str], schema: Mapping[str, Any] | None) -> str:
    says = parameter.groupdict().get("string")
    if says is None:
        return as_json(value, schema)
    # A schema that allows everything but text: text that is not JSON stays text.
    return as_json(value, {"type": "string"} if says == "true" else {"type": "object"})


_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
GLM_KEY = "<arg_key>"
_GLM = _TaggedParameters(
    head=re.compile(r"\s*([^\s<>{}]+)\s*"),
    parameter=re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>"),
    opening=GLM_KEY,
    value="<arg_value>",
    closing="</arg_value>",
)


def glm(schemas: Schemas) -> Grammar:
    """4.5 and later: `<tool_call>NAME`, `<arg_key>P</arg_key><arg_value>value</arg_value>` each, `</tool_call>`."""
    return Grammar({_OPEN: _GLM.region(schemas, _CLOSE, (_OPEN,))}, dropped=(_CLOSE,), strays=_GLM.tags)


QWEN_FUNCTION = "<function="
_QWEN_END = "</function>"
_QWEN = _TaggedParameters(
    head=re.compile(r"\s*<function=([^<>\n]*)>\s*"),
    parameter=re.compile(r"<parameter=([^<>\n]*)>"),
    opening="<parameter=",
    closing="</parameter>",
    end=_QWEN_END,
    wrapped=True,
)


def qwen_xml(schemas: Schemas) -> Grammar:
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`.

    The outer marker is often missing. A value loses one line break at each end.
    """
    inside = _QWEN.region(schemas, _CLOSE, (_OPEN,))
    outside = _QWEN.region(schemas, _QWEN_END, (_OPEN, QWEN_FUNCTION), before=QWEN_FUNCTION)
    return Grammar({_OPEN: inside, QWEN_FUNCTION: outside}, dropped=(_CLOSE, _QWEN_END), strays=_QWEN.tags)


MINIMAX_OPEN = "<minimax:tool_call>"
DSML = "｜DSML｜"
_INVOKED_NAME = r"""["']?([^"'<>\n]*)["']?"""


def minimax(schemas: Schemas) -> Grammar:
    """M2: `<invoke name="NAME"><parameter name="P">value</parameter></invoke>` in `<minimax:tool_call>` and its end."""
    return _invoke_xml("", (MINIMAX_OPEN, MINIMAX_OPEN.replace("<", "</")), schemas)


def dsml(schemas: Schemas) -> Grammar:
    """DeepSeek V3.2: as `minimax`, with `｜DSML｜` in each tag; `string="true"` or `"false"` tells text from JSON."""
    outer = [f"{tag}{DSML}{name}>" for name in ("function_calls", "tool_calls") for tag in ("<", "</")]
    return _invoke_xml(DSML, outer, schemas)


def _invoke_xml(prefix: str, outer: Sequence[str], schemas: Schemas) -> Grammar:
    opening, closing = f"<{prefix}invoke name=", f"</{prefix}invoke>"
    text = r"""(?:\s+string=["']?(?P<string>true|false)["']?)?""" if prefix else ""
    form = _TaggedParameters(
        head=re.compile(rf"{_INVOKED_NAME}>\s*"),
        parameter=re.compile(rf"<{prefix}parameter\s+name={_INVOKED_NAME}{text}\s*>"),
        opening=f"<{prefix}parameter ",
        closing=f"</{prefix}parameter>",
    )
    return Grammar(
        {opening: form.region(schemas, closing, (opening, *outer))}, dropped=(closing, *outer), strays=form.tags
    )
