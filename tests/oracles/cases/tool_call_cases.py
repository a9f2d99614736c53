# ruff: noqa: RUF001
"""Generated texts with tool calls in each format, as the models' chat templates write them, intact and damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from workers.policy.tool_calls import parser

Call: TypeAlias = tuple[str, dict[str, Any]]
Read: TypeAlias = Sequence[Sequence[Any]]
"""Names and arguments as a parser returns them; None in place of the arguments of a malformed call."""
RECORDS = Path(__file__).parents[2] / "data" / "oracles" / "tool_call_parsers.jsonl"


@dataclass(frozen=True, slots=True)
class Case:
    """A text, and the calls that it was made from: `kind` names its modification."""

    format: str
    kind: str
    text: str
    calls: tuple[Call, ...]


WORDS = (
    "ls -l",
    "a",
    "",
    "é ü 漢字",
    'say "hi"',
    "it's",
    "a\\b",
    "two\nlines",
    "\ttab",
    "{",
    "}",
    "[x]",
    "a, b: c",
    "5",
    "true",
)
"""Values of text without markers; those that look like another type are text by the schema."""
MARKS = {
    "hermes": ("</tool_call>", "<tool_call>"),
    "qwen_xml": ("</parameter>", "<parameter=text>", "</function>", "<function=edit>", "</tool_call>", "<tool_call>"),
    "llama3_json": ("<|python_tag|>", "};", '{"name": "x", "parameters": {}}'),
    "mistral": ("[ARGS]", "]", "[{"),
    "mistral_array": ("[ARGS]", "]", "[{"),
    "deepseek": ("```", "```json\n"),
    "deepseek_v3": ("``", '"}'),
    "deepseek_v4": ("</｜DSML｜parameter>", '<｜DSML｜parameter name="text" string="true">', "</｜DSML｜invoke>"),
    "deepseek_v32": ("</｜DSML｜parameter>", '<｜DSML｜parameter name="text" string="true">', "</｜DSML｜invoke>"),
    "pythonic": (")]", '"""', "[f(a=1)]"),
    "glm": ("</arg_value>", "<arg_key>", "<arg_value>", "</tool_call>"),
    "kimi_k2": ("functions.edit:0", "}}"),
    "minimax_m2": (
        "</parameter>",
        '<parameter name="text">',
        "</invoke>",
        '<invoke name="edit">',
        "</minimax:tool_call>",
    ),
    "gpt_oss": ("json", "to=functions.edit"),
    "gemma4": ("call:edit{", "}", ","),
}
"""Markers of a format, as text in a value; for formats whose markers are single tokens, their spelling is text."""
TYPES = {"text": "string", "line": "integer", "size": "number", "force": "boolean", "rows": "array", "more": "object"}
NAMES = ("bash", "edit", "get_weather", "a-b", "x1")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in NAMES
]


def _value(chosen: random.Random, kind: str, words: Sequence[str]) -> Any:
    if kind == "string":
        return "".join(chosen.choice(words) for _ in range(chosen.randint(1, 3)))
    if kind == "integer":
        return chosen.randint(-3, 10**6)
    if kind == "number":
        return chosen.choice([0.5, -1.25, 3.0])
    if kind == "boolean":
        return chosen.random() < 0.5
    if kind == "array":
        return [chosen.choice([1, "two", None, [3], {"k": "v"}]) for _ in range(chosen.randint(0, 3))]
    return {key: chosen.choice([1, 'q"uote', {"deep": [True]}, "x\ny"]) for key in chosen.sample(("a", "b c", "d"), 2)}


def _calls(chosen: random.Random, words: Sequence[str], name_of: Callable[[str], str]) -> tuple[Call, ...]:
    calls = []
    for _ in range(chosen.choice([1, 1, 2, 3])):
        keys = chosen.sample(sorted(TYPES), chosen.randint(0, 3))
        name = name_of(chosen.choice(NAMES))
        calls.append((name, {key: _value(chosen, TYPES[key], words) for key in keys}))
    return tuple(calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """Return a value as templates write it between tags."""
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_call>' for n, a in calls)


def _qwen_xml(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        tags = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items()]
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _invokes(calls: Sequence[Call], prefix: str, outer: str) -> str:
    text = []
    for name, arguments in calls:
        text.append(f'<{prefix}invoke name="{name}">\n')
        for key, value in arguments.items():
            says = f' string="{str(isinstance(value, str)).lower()}"' if prefix else ""
            text.append(f'<{prefix}parameter name="{key}"{says}>{_plain(value)}</{prefix}parameter>\n')
        text.append(f"</{prefix}invoke>\n")
    return f"<{outer}>\n{''.join(text)}</{outer}>"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _json(value)


def _python(value: Any) -> str:
    return repr(value)


def _deepseek(calls: Sequence[Call]) -> str:
    body = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _mistral_array(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {_json(a)}}}' for n, a in calls) + "]"


def _kimi(calls: Sequence[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _gpt_oss(calls: Sequence[Call]) -> str:
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{head}{n} <|constrain|>json<|message|>{_json(a)}<|call|>" for n, a in calls)


def _python_calls(calls: Sequence[Call]) -> str:
    arguments = [", ".join(f"{key}={_python(value)}" for key, value in each.items()) for _, each in calls]
    return "[" + ", ".join(f"{name}({given})" for (name, _), given in zip(calls, arguments, strict=True)) + "]"


WRITERS: Mapping[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama3_json": lambda calls: "; ".join(f'{{"name": "{n}", "parameters": {_json(a)}}}' for n, a in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls),
    "mistral_array": _mistral_array,
    "deepseek": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": lambda calls: _invokes(calls, "｜DSML｜", "｜DSML｜tool_calls"),
    "deepseek_v32": lambda calls: _invokes(calls, "｜DSML｜", "｜DSML｜function_calls"),
    "pythonic": _python_calls,
    "glm": _glm,
    "kimi_k2": _kimi,
    "minimax_m2": lambda calls: _invokes(calls, "", "minimax:tool_call"),
    "gpt_oss": _gpt_oss,
    "gemma4": lambda calls: "".join(f"<|tool_call>call:{n}{_gemma_value(a)}<tool_call|>" for n, a in calls),
}
CLOSING = ("</parameter>", "</tool_call>", "</function>", "</arg_value>", "</invoke>", "</｜DSML｜parameter>")
"""Tags that models omit."""


_OURS = {"deepseek_v3": "deepseek", "deepseek_v4": "deepseek_v32", "mistral_array": "mistral"}
"""The parsers of formats that are variants of one."""
STRICT = frozenset({"whole", "text"})
"""The kinds of cases in which every call must be parsed as it was written."""


def ours(case: Case) -> Read:
    """Return the calls as the farm parses them."""
    parsed = parser(_OURS.get(case.format, case.format), tools=TOOLS).parse(case.text)
    read = []
    for call in parsed.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = None
        read.append([call.name, arguments if isinstance(arguments, dict) and call.name else None])
    assert sum(arguments is None for _, arguments in read) == parsed.n_invalid
    return read


def faults(case: Case, theirs: Mapping[str, Read | str]) -> list[str]:
    """Return the faults of the farm's result for a case: an intact call that is parsed differently, or a damaged
    text that is parsed as calls which it does not contain, without any reported as malformed."""
    read = ours(case)
    if agrees(read, case.calls):
        return []
    shown = f"{case.format}, {case.kind}: {case.text!r} is read as {read}, by others as {dict(theirs)}"
    if case.kind in STRICT:
        return [f"not as written: {shown}"]
    made_up = [call for call in read if call[1] is not None and not any(agrees([call], [each]) for each in case.calls)]
    # the markers of a value may end it by all rules
    if made_up and not (
        case.kind == "marks" and any(agrees(read, each) for each in theirs.values() if each != str(each))
    ):
        return [f"made up: {shown}"]
    lost = all(arguments is not None for _, arguments in read) and not agrees(read, case.calls[: len(read)])
    return [f"lost without a word: {shown}"] if lost and not made_up else []


def agrees(one: Read, other: Sequence[Sequence[Any]]) -> bool:
    """Return True if two results are equal: 3 and 3.0 are, 1 and true are not."""
    return _canonical(one) == _canonical(other)


def _canonical(value: Any) -> str:
    def exact(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: exact(inner) for key, inner in each.items()}
        if isinstance(each, list | tuple):
            return [exact(inner) for inner in each]
        return int(each) if isinstance(each, float) and each.is_integer() else each

    return json.dumps(exact(value), sort_keys=True)


def cases(name: str, n: int, seed: int = 0) -> list[Case]:
    """Return cases of a format: half of them intact, and an eighth each with markers in values, cut, with a closing tag
    omitted, and with text before."""
    chosen = random.Random(f"{name} {seed}")
    write = WRITERS[name]
    name_of = (lambda each: each.replace("-", "_")) if name == "pythonic" else (lambda each: each)
    result = []
    for number in range(n):
        kind = ("whole", "marks", "whole", "cut", "whole", "dropped", "whole", "text")[number % 8]
        calls = _calls(chosen, (*WORDS, *MARKS[name] * 3) if kind == "marks" else WORDS, name_of)
        text = write(calls)
        if kind == "cut":
            text = text[: chosen.randrange(1, len(text))]
        elif kind == "dropped":
            places = [
                (text.find(tag, at), tag) for tag in CLOSING for at in range(len(text)) if text.startswith(tag, at)
            ]
            if not places:
                kind = "whole"
            else:
                at, tag = chosen.choice(places)
                text = text[:at] + text[at + len(tag) :]
        elif kind == "text" and name not in ("llama3_json", "pythonic"):
            text = f"Let me look.\n\n{text}"
        result.append(Case(name, kind, text, calls))
    return result
