# ruff: noqa: RUF001, RUF002
"""Calls as `<invoke name="NAME"><parameter name="P">value</parameter></invoke>`: MiniMax M2 and DeepSeek V3.2.

MiniMax M2 puts them between `<minimax:tool_call>` and its end, and types follow from the tool's schema. DeepSeek V3.2
has `｜DSML｜` in each tag, and `string="true"` or `"false"` says whether a value is text or JSON.
"""

from __future__ import annotations

import re

from workers.policy.tool_calls.parameter_schemas import Schemas
from workers.policy.tool_calls.splitter import Grammar
from workers.policy.tool_calls.tagged_parameters import TaggedParameters

MINIMAX_OPEN = "<minimax:tool_call>"
DSML = "｜DSML｜"
_DSML_ALL = ("function_calls", "tool_calls")
_NAME = r"""["']?([^"'<>\n]*)["']?"""


def minimax_grammar(schemas: Schemas) -> Grammar:
    return _grammar("", (MINIMAX_OPEN, MINIMAX_OPEN.replace("<", "</")), schemas)


def dsml_grammar(schemas: Schemas) -> Grammar:
    return _grammar(DSML, tuple(f"{opening}{DSML}{name}>" for name in _DSML_ALL for opening in ("<", "</")), schemas)


def _grammar(prefix: str, outer: tuple[str, ...], schemas: Schemas) -> Grammar:
    opening, closing = f"<{prefix}invoke name=", f"</{prefix}invoke>"
    text = r"""(?:\s+string=["']?(?P<string>true|false)["']?)?""" if prefix else ""
    form = TaggedParameters(
        head=re.compile(rf"{_NAME}>\s*"),
        parameter=re.compile(rf"<{prefix}parameter\s+name={_NAME}{text}\s*>"),
        opening=f"<{prefix}parameter ",
        closing=f"</{prefix}parameter>",
    )
    region = form.region(schemas, closing, (opening, *outer))
    return Grammar({opening: region}, dropped=(closing, *outer), strays=form.tags)
