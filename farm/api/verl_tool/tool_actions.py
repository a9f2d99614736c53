"""Conversion of actions, the policy's texts up to a stop token, to tool calls of the farm, and of outputs to texts.

Texts are searched in one pass: one that opens ten thousand blocks and closes none costs no more than another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from farm.client import serialization

USAGE = (
    "Available tools:\n"
    "• bash: commands of a persistent shell, between <bash> and </bash> or in a ```bash block.\n"
    "• python: code of a persistent IPython, between <python> and </python> or in a ```python block.\n"
    "• search: a query, between <search> and </search>."
)
TOOLS = ("bash", "python", "search", "finish")
_FENCE = "```"
_FORMS = (
    ("bash", re.compile("<bash>"), "</bash>"),
    ("bash", re.compile(r"```\s*(?:bash|shell|sh|terminal)\b"), _FENCE),
    ("python", re.compile("<python>"), "</python>"),
    ("python", re.compile(r"```\n?(?:python3?|py)\b"), _FENCE),
    ("search", re.compile("<search>"), "</search>"),
    ("answer", re.compile("<answer>"), "</answer>"),
    ("tool_call", re.compile("<tool_call>"), "</tool_call>"),
)
"""Tools by the forms of their actions: the begin and the end of a block."""
_ARGUMENT = {"bash": "command", "python": "code", "search": "query"}
_TAG = {"bash": "o", "python": "output"}


@dataclass(frozen=True, slots=True)
class ToolAction:
    """A call of a tool; `tool` is `answer` for an action that calls none, and ends its trajectory."""

    tool: str
    arguments: Mapping[str, Any]
    is_fenced: bool = False
    is_json: bool = False


def action_of(text: str) -> ToolAction | None:
    """Return the call of an action: the last block names the tool. None without a complete block."""
    last_end, found = 0, None
    for form in _FORMS:
        blocks = list(_blocks(text, *form[1:]))
        if blocks and blocks[-1][1] > last_end:
            last_end, found = blocks[-1][1], (form, [code.strip() for code, _ in blocks])
    if found is None:
        return None
    (tool, _, closing), codes = found
    if tool == "tool_call":
        return _json_call(codes[-1])
    if tool == "answer":
        return ToolAction(tool, {})
    code = codes[-1] if tool == "search" else "\n".join(codes)
    return ToolAction(tool, {_ARGUMENT[tool]: code}, is_fenced=closing == _FENCE)


def _blocks(text: str, opening: re.Pattern[str], closing: str) -> Iterator[tuple[str, int]]:
    """Yield the content of each complete block, and its end."""
    at = 0
    while (begun := opening.search(text, at)) is not None:
        end = text.find(closing, begun.end())
        if end < 0:
            return
        at = end + len(closing)
        yield text[begun.end() : end], at


def _json_call(text: str) -> ToolAction | None:
    try:
        call = serialization.parsed(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(arguments := call.get("arguments"), dict):
        return None
    tool = call.get("name")
    if not isinstance(tool, str) or tool not in _ARGUMENT or not isinstance(arguments.get(_ARGUMENT[tool]), str):
        return None
    return ToolAction(tool, {_ARGUMENT[tool]: arguments[_ARGUMENT[tool]]}, is_json=True)


def shown(text: str, action: ToolAction, output: str) -> str:
    """Return the output of a tool as the continuation of its action's text: in the block that this opened, if any."""
    if action.tool == "search":
        return f"\n\n<information>{output.strip()}</information>\n\n"
    tag = _TAG[action.tool]
    output = output.strip(" \n")
    if text.endswith(f"{_FENCE}output"):
        return f"\n{output}\n{_FENCE}\n"
    if text.endswith(f"<{tag}>"):
        return f"\n{output}\n</{tag}>\n"
    if action.is_json:
        return f"\n{output}\n"
    if not action.is_fenced:
        return f"\n<{tag}>\n{output}\n</{tag}>\n"
    if text.count(_FENCE) % 2:
        return f"output\n{output}\n{_FENCE}\n"
    return f"\n{_FENCE}output\n{output}\n{_FENCE}\n"
