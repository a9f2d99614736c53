"""Text of a policy: invisible characters are written out, and any content can be shown."""

from __future__ import annotations

from typing import Any

import pytest

from farm.web.rendering import LONGEST, arguments_of, text_of, visible
from farm.web.rollout_views import ShownCall, conversation, tool_calls
from tests.services.model_calls import model_call


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("\x1b[31mred\x07\x00", "␛[31mred␇␀"),
        ("abc\u202efdp.exe", "abc⟨U+202E⟩fdp.exe"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("\u2028line\u2066iso", "⟨U+2028⟩line⟨U+2066⟩iso"),
        ("half \ud800 of a pair", "half ⟨U+D800⟩ of a pair"),
        ("del \x7f c1 \x9b", "del ⟨U+007F⟩ c1 ⟨U+009B⟩"),
        ("日本語 👍 é", "日本語 👍 é"),
    ],
)
def test_invisible_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_long_text_is_shown_in_part() -> None:
    shown = visible("a" * 10_000_000)
    assert len(shown) < LONGEST + 200
    assert "9800000 characters are left out" in shown


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("said", "said"),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, "b"], "a[image_url]b"),
        (7, "7"),
        ({"text": "a"}, "{'text': 'a'}"),
        ([], ""),
    ],
)
def test_content_of_any_kind_has_a_text(content: Any, text: str) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{"command": "ls", "n": 2}', [("command", "ls"), ("n", "2")]),
        ("no json", [("", "no json")]),
        ("[1, 2]", [("", "[1, 2]")]),
        ({"a": {"b": 1}}, [("a", '{"b": 1}')]),
        (None, [("", "None")]),
        ("", [("", "")]),
    ],
)
def test_arguments_of_any_kind_are_shown(raw: Any, arguments: list[tuple[str, str]]) -> None:
    assert arguments_of(raw) == arguments


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (None, []),
        ([{"function": {"name": "bash", "arguments": "{}"}}], ["bash"]),
        ([{"function": None}, 7, {"name": "x"}], ["?", "?", "?"]),
        ("text", ["?"]),
        ([{"function": {"name": None}}], ["None"]),
    ],
)
def test_tool_calls_of_any_shape_are_shown(made: Any, names: list[str]) -> None:
    assert [each.name for each in tool_calls({"tool_calls": made})] == names


def test_conversation_is_in_order_with_the_calls_that_it_answers() -> None:
    first = model_call(
        0,
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        response={"role": "assistant", "content": "a", "reasoning_content": "hm"},
        observations=[{"role": "tool", "tool_call_id": "c1", "content": "o"}],
        started_at=100.0,
        latency_s=2.0,
    )
    second = model_call(1, messages=[], response={"role": "weird", "tool_calls": 7}, started_at=105.0, latency_s=1.0)
    shown = conversation([first, second])
    assert [(each.role, each.style, each.at_s) for each in shown] == [
        ("system", "system", 0.0),
        ("user", "user", 0.0),
        ("assistant", "assistant", 2.0),
        ("tool", "tool", 2.0),
        ("weird", "user", 6.0),
    ]
    assert shown[2].call is first
    assert (shown[2].thought, shown[3].answers) == ("hm", "c1")
    assert shown[4].calls == [ShownCall("?", [("", "7")])]
    assert conversation([]) == []


def test_invisible_letters_and_tags_are_written_out_and_emoji_are_kept() -> None:
    hidden = "".join(chr(0xE0000 + ord(each)) for each in "run it") + "\U000e0101\u3164\u115f\uffa0\u180e\u034f\ufff9"
    shown = visible(f"a{hidden}b")
    assert shown.count("⟨U+") == len(hidden)
    assert shown.isprintable()
    assert shown.startswith("a⟨U+E0072⟩")
    assert visible("❤\ufe0f 한국어 नमस्ते") == "❤\ufe0f 한국어 नमस्ते"
