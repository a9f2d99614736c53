# ruff: noqa: RUF001
"""A stream gives the same result as the whole text, however it is split; nothing raises, and time grows linearly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.services.soak import at_length
from workers.plugins.interfaces import Delta
from workers.policy.tool_calls import FORMATS, Parsed, deltas, message, opens_reasoning, parser

PIECES = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=", "<function=f>"),
    *("</function>", "<parameter=a>", "</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "', '"}}', "function", "```json", "```"),
    *("[f(a=1)", "[f(a=", ", g(b='", "')]", '"""', "'''", "<|python_start|>", "<|tool_call_end|>", "-", "(" * 9),
    *("<parameter=", '<invoke name="f">', '<parameter name="a">', "</invoke>", "<arg_key>a</arg_key>", "<arg_value>"),
    *(
        "</arg_value>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|channel|>",
        "<|call|>",
    ),
    *("<|channel|>commentary to=", "f<|message|>", "<|start|>assistant", "<|end|>", "<|tool_call>", "<tool_call|>"),
    *("call:f{a:", '<|"|>', "<|channel>thought\n", "<channel|>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="a" string="false">', "</｜DSML｜parameter>"),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        ";",
        ",",
        ":",
        "\n",
        " ",
        "x",
        "é",
        "\ud800",
        "\0",
        "1e999",
        "\\d",
        "<",
        "｜",
    ),
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=24).map("".join) | st.text()
formats = st.sampled_from(FORMATS)


def streamed(pieces: Sequence[str], name: str, **options: Any) -> tuple[list[Delta], Parsed]:
    splitter = parser(name, **options).stream()
    result = [delta for piece in pieces for delta in splitter.feed(piece)]
    result += splitter.end()
    return result, splitter.parsed()


def joined(found: Sequence[Delta], reasoning: bool) -> str:
    return "".join(delta.text for delta in found if delta.reasoning is reasoning)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def assert_same(text: str, pieces: Sequence[str], name: str, opened: bool) -> None:
    whole = parser(name, opened=opened).parse(text)
    result, parsed = streamed(pieces, name, opened=opened)
    assert parsed == whole
    assert (joined(result, False), joined(result, True)) == (whole.content, whole.reasoning)


@given(text=texts, cuts=st.lists(st.integers(0, 10**6), max_size=8), name=formats, opened=st.booleans())
@pytest.mark.soak
@examples(max_examples=at_length(60, 5_000), deadline=None)
def test_stream_gives_the_same_result_as_the_whole_text(text: str, cuts: list[int], name: str, opened: bool) -> None:
    assert_same(text, cut(text, cuts), name, opened)
    assert_same(text, list(text), name, opened)


TRICKY = [
    ("hermes", 'a\n<tool_call>\n{"name": "f", "arguments": {"a": "\\\\\\"</tool_call>"}}\n</tool_call>\nb'),
    ("hermes", '<think>x</think>\n\n<tool_call>{"name": "f" "</tool_call>\n b <tool_call>{"name": "g"}</tool_call>'),
    ("qwen_xml", "a <function=f>\n<parameter=a>\n</tool_call>\n</parameter>\n</function></tool_call> <b"),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": "}\\""}} ; {"name": "g", "parameters": {}};<|python_tag|>{"x": 1} b',
    ),
    ("mistral", '[THINK]a[/THINK][TOOL_CALLS]f[CALL_ID]1[ARGS]{"a": "]}"}[TOOL_CALLS] [{"name": "g"}] [b]'),
    (
        "deepseek",
        "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>b",
    ),
    ("pythonic", r"""<|python_start|>[f(a='''it's "so" ]''', b='\\', c='', d=''''"'''), g(a="]")]<|python_end|> b"""),
    ("pythonic", "[f.g (x)] [f(a=1)]"),
    ("none", "</think> a <think></thin </think> b"),
    ("qwen_xml", "<function=f><parameter=a>1</function> <parameter=b>2</parameter></function> </parameter> c"),
    ("glm", "a<tool_call>f\n<arg_key>a</arg_key><arg_value></tool_call></arg_value></tool_call> b </arg_value>"),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">b</parameter></invoke></minimax:tool_call> <i',
    ),
    ("kimi_k2", "a <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|> b"),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}<|call|> b",
    ),
    ("gemma4", '<|channel>thought\na<channel|>b<|tool_call>call:f{a:<|"|><tool_call|><|"|>}<tool_call|> c'),
]


@pytest.mark.parametrize(("name", "text"), TRICKY)
@pytest.mark.parametrize("opened", [False, True])
def test_any_single_split_and_all_splits_change_nothing(name: str, text: str, opened: bool) -> None:
    for place in range(len(text)):
        assert_same(text, [text[:place], text[place:]], name, opened)
    assert_same(text, list(text), name, opened)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@given(text=texts, name=formats)
@pytest.mark.soak
@examples(max_examples=at_length(60, 5_000), deadline=None)
def test_call_is_usable_or_counted_as_invalid(text: str, name: str) -> None:
    parsed = parser(name).parse(text)
    possible = [bool(call.name) and is_object(call.arguments) for call in parsed.tool_calls]
    assert possible.count(False) == parsed.n_invalid
    for call in message(parsed).get("tool_calls", []):
        assert len(call["id"]) >= 1


@given(text=st.text(st.characters(exclude_characters="<[{")), name=formats)
@example(text="t", name="hermes")
def test_text_that_cannot_begin_a_marker_is_passed_on_at_once(text: str, name: str) -> None:
    start = parser(name).grammar.bare_start
    # gpt_oss also begins a call by a word, `to=`
    assume(not (start and text.lstrip().startswith(start)))
    splitter = parser(name).stream()
    body = text.rstrip()
    assert joined(splitter.feed(text), False) == body
    assert joined(splitter.end(), False) == text[len(body) :]


def test_only_possible_markers_are_held_back() -> None:
    splitter = parser("hermes").stream()
    assert splitter.feed("a <tool") == [Delta("a")]
    assert splitter.feed(" b") == [Delta(" <tool b")]
    assert splitter.feed(" <think") == []
    assert splitter.feed("> c d") == [Delta("c d", reasoning=True)]
    assert splitter.feed("</thin") == []
    assert splitter.feed("k>\n\n") == []
    assert splitter.feed("e") == [Delta("\ne")]
    assert splitter.end() == []


# the repeated text, and the text before and after it
ADVERSE = [
    *((repeated, "", "") for repeated in PIECES),
    *((repeated, "<tool_call>", "") for repeated in ('"', '\\"', "</tool_call>", "[", "{", '{"a":', "<parameter=a>")),
    ('<tool_call>\\"</tool_call>', "", ""),
    ('<tool_call>"</tool_call>', "", "\n"),
    ("<tool_call></tool_call>", '<tool_call>"', ""),
    ("</parameter> ", "<function=f><parameter=a>", ""),
    ("</parameter> ", "<function=f></function>", ""),
    ("a ", "<|tool_call>call:f{a:", "}"),
    ('<|"|>', "<|tool_call>call:f{a:", "}"),
    ("[", "<|tool_call>call:f{a:", "}"),
    ("a:{", "<|tool_call>call:f{", "}"),
    (" ", "<|tool_call>call:f{a", "}"),
    ("<arg_key>a</arg_key><arg_value>1</arg_value>", "<tool_call>f", "</tool_call>"),
    ("<arg_key>", "<tool_call>f<arg_key>a</arg_key><arg_value>", ""),
    (" ", "<|channel|>commentary to=f", "x"),
    ("a", "<|channel|>commentary to=", "x"),
    ("<parameter=a></parameter>", "<function=f>", ""),
    (" ", "<tool_call><function=f><parameter=a>x</parameter>", "x"),
    (" ", "[TOOL_CALLS]a", "b[ARGS]{}"),
    (" ", "[TOOL_CALLS]", "a"),
    (" ", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "x"),
    (" ", "<think>", "x"),
    (" ", '<tool_call>{"name"', "x"),
    ("a", "[", "("),
    ("a", "[f(", "=1)]"),
    ("-", "[f(a=", "1)]"),
    ("1+", "[f(a=", "1)]"),
    (".a", "[f", "()]"),
    (", f(a)", "[f(a)", "]"),
    ('\\"', '[f(a="', '")]'),
    ('\\"', '[f(a="', ""),
    ("9", "[f(a=", ")]"),
    ("9", '<tool_call>{"name": "f", "arguments": {"a": ', "}}</tool_call>"),
    ("[", '<tool_call>{"name": "f", "arguments": {"a": ', "</tool_call>"),
    ("[", "[f(a=", ""),
    ('{"a":', "<|python_tag|>", ""),
    (";{", '{"name": "f", "parameters": {}}', ""),
    ('{"name": "f", "parameters": {}};', "", ""),
]


def n_steps(work: Callable[[], object]) -> int:
    """Return the number of executed Python lines."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", FORMATS)
def test_long_repetitions_are_parsed(name: str) -> None:
    for repeated, before, after in ADVERSE:
        text = before + repeated * (100_000 // len(repeated)) + after
        parsed = parser(name).parse(text)
        assert len(parsed.content) + len(parsed.reasoning) <= 2 * len(text)


@pytest.mark.parametrize("name", FORMATS)
def test_twice_the_text_takes_twice_the_steps(name: str) -> None:
    for repeated, before, after in ADVERSE:
        steps = [n_steps(partial(parser(name).parse, before + repeated * n + after)) for n in (100, 200, 400)]
        assert steps[2] - steps[1] <= 2.2 * (steps[1] - steps[0]) + 200, (repeated, before, after, steps)


class TestMessage:
    def test_message_holds_the_parsed_parts(self) -> None:
        parsed = parser("hermes").parse('<think>a</think>b<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        made = message(parsed)
        (call,) = made.pop("tool_calls")
        assert made == {"role": "assistant", "content": "b", "reasoning_content": "a"}
        assert call["function"] == {"name": "f", "arguments": "{}"}
        assert call["type"] == "function"
        assert (len(call["id"]), call["id"].isalnum()) == (9, True)

    def test_sampled_ids_are_kept_and_the_others_are_unique(self) -> None:
        parsed = parser("mistral").parse("[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
        ids = [call["id"] for call in message(parsed)["tool_calls"]]
        assert ids[0] == "abc"
        assert len(set(ids)) == 3

    def test_plain_answer_has_only_role_and_content(self) -> None:
        assert message(parser("none").parse("x")) == {"role": "assistant", "content": "x"}

    def test_whole_message_can_be_passed_on_like_a_stream(self) -> None:
        assert deltas({"role": "assistant", "content": "b", "reasoning": "a"}) == [Delta("a", True), Delta("b")]
        assert deltas({"role": "assistant", "content": None}) == []


def test_prompt_that_opens_reasoning_is_recognized() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert opens_reasoning("[/INST][THINK]")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
