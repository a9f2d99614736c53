"""The output format of an answer, in the form of each engine."""

from __future__ import annotations

from typing import Any

import pytest

from workers.policy.answer_form import FormedSampling, chat_fields, guide, guide_of

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
LOOK_TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": 'say "stop"'}}


def tags_of(form: dict[str, Any]) -> list[dict[str, Any]]:
    tags: list[dict[str, Any]] = form["structural_tag"]["format"]["tags"]
    return tags


def test_schema_constrains_the_whole_answer() -> None:
    assert guide(FormedSampling(answer_schema=SCHEMA), "hermes", False, []) == {"json_schema": SCHEMA}


def test_open_reasoning_ends_before_the_format_begins() -> None:
    for sampling in (FormedSampling(answer_schema=SCHEMA), FormedSampling(tool_choice="required")):
        form = guide(sampling, "hermes", True, [LOOK_TOOL])["structural_tag"]["format"]
        thought, _, rest = form["elements"]
        assert (thought["content"], thought["end"]) == ({"type": "any_text"}, "</think>")
        assert rest["type"] in ("json_schema", "tags_with_separator")


def test_required_call_is_constrained_in_the_models_own_format() -> None:
    form = guide(FormedSampling(tool_choice="required"), "hermes", False, [LOOK_TOOL, STOP])
    look, stop = tags_of(form)
    assert look["begin"] + '{"a": "b"}' + look["end"] == (
        '<tool_call>\n{"name": "look", "arguments": {"a": "b"}}\n</tool_call>'
    )
    assert look["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert '"say \\"stop\\""' in stop["begin"]
    assert form["structural_tag"]["format"]["at_least_one"]
    named = FormedSampling(tool_choice="required", tools_allowed=("look",))
    assert [tag["begin"] for tag in tags_of(guide(named, "hermes", False, [LOOK_TOOL, STOP]))] == [look["begin"]]


@pytest.mark.parametrize("tool_format", ["mistral", "llama3_json", "qwen_xml", "deepseek", "pythonic", "none"])
def test_call_in_an_unsupported_format_has_no_guide(tool_format: str) -> None:
    assert guide(FormedSampling(tool_choice="required"), tool_format, False, [LOOK_TOOL]) == {}


def test_schema_or_required_tool_needs_a_guide() -> None:
    assert FormedSampling(answer_schema=SCHEMA).needs_guide
    assert FormedSampling(tool_choice="required").needs_guide
    assert not FormedSampling(tool_choice="none").needs_guide
    assert guide_of(FormedSampling(tool_choice="none")) == {}


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (FormedSampling(), {}),
        (FormedSampling(tool_choice="none"), {"tool_choice": "none"}),
        (FormedSampling(tool_choice="required", tools_allowed=("a", "b")), {"tool_choice": "required"}),
        (
            FormedSampling(tool_choice="required", tools_allowed=("a",)),
            {"tool_choice": {"type": "function", "function": {"name": "a"}}},
        ),
        (
            FormedSampling(answer_schema=SCHEMA),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
    ],
)
def test_output_format_fields_of_a_chat_request(sampling: FormedSampling, fields: dict[str, Any]) -> None:
    assert chat_fields(sampling) == fields
