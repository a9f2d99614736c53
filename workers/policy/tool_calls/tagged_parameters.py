"""Calls written as a name and a tag for each parameter, with its value as plain text: one reader for all variants.

A value ends at the first closing tag followed by another parameter or the end of the call; any other closing tag in it
is text. A value that contains an opening tag has lost its own closing tag, or contains a pair of tags as text: the two
cases cannot be distinguished, so such a call is malformed. So is one that names a parameter twice, or is cut off by the
end of the text, as more parameters might have followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.policy.tool_calls.parameter_schemas import Schemas, as_json
from workers.policy.tool_calls.scanner import Delimited, Enclosed, Quotes
from workers.policy.tool_calls.tool_call import ParsedToolCall, malformed


@dataclass(frozen=True, slots=True)
class TaggedParameters:
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
    def quotes(self) -> Quotes:
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
        return lambda trusting: Enclosed(
            lambda raw: [self.call(before + raw, schemas)],
            closer,
            stops,
            self.quotes,
            trusting,
            lambda raw: [self.unfinished(before + raw, schemas)],
        )

    def call(self, raw: str, schemas: Schemas) -> ParsedToolCall:
        """Return the call in the text of a region."""
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

    def unfinished(self, raw: str, schemas: Schemas) -> ParsedToolCall:
        """Return the call of a region without an end: it is complete only if its own last tag is there."""
        if self.end and raw.rstrip().endswith(self.end):
            return self.call(raw, schemas)
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
