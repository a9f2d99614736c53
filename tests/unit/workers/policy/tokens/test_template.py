"""Chat templates run like in transformers, on messages in any client's form, and can do nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from farm.records.trajectory import Message
from tests.unit.workers.policy.tokens.zoo import CHATML, LLAMA31, SEARCH, assistant, call, system, tool, user
from workers.policy.tokens.template import ChatTemplate, TemplateError


def rendered(source: str, *messages: Message, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, "tiny").render(messages, (), generation_prompt=False, **kwargs)


def test_blocks_leave_no_whitespace_and_loops_can_be_left() -> None:
    source = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'tool' %}
        {% break %}
    {% endif %}
{{ message.content }};{% endfor %}"""
    assert rendered(source, user("a"), user("b"), tool("1", "c")) == "<s>a;b;"


def test_json_is_escaped_neither_for_html_nor_to_ascii() -> None:
    message = {"role": "user", "content": "<é 'x' & y>"}
    assert rendered("{{ messages[0].content | tojson }}", message) == "\"<é 'x' & y>\""
    assert rendered("{{ [1, 'b'] | tojson(indent=2) }}") == '[\n  1,\n  "b"\n]'
    assert rendered("{{ {'b': 1, 'a': 2} | tojson }}") == '{"b": 1, "a": 2}'


def test_generation_marks_change_nothing() -> None:
    assert rendered("a{% generation %}{{ messages[0].content }}{% endgeneration %}c", user("b")) == "abc"


def test_variables_of_transformers_are_defined() -> None:
    source = "{{ documents is none }} {{ tools is none }} {{ add_generation_prompt }} {{ strftime_now('%Y') | length }}"
    assert rendered(source) == "True True False 4"
    assert rendered("{{ thinking | default('no') }}", thinking="yes") == "yes"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{{ messages[7].content + 'x' }}", "refused the conversation"),
        ("{{ 1 + 'a' }}", "TypeError"),
    ],
)
def test_template_that_raises_is_named_with_its_message(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=f"chat template of tiny .*{message}"):
        rendered(source, user("a"))


def test_invalid_template_is_named() -> None:
    with pytest.raises(TemplateError, match="tiny cannot be compiled"):
        ChatTemplate("{% if %}", name="tiny")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].__class__.__base__ }}",
        "{{ messages.__class__ }}{{ messages.append({}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__globals__['re'].sub }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) | upper }}{{ undefined.x.y }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context.environment.loader.x }}",
    ],
)
def test_template_accesses_no_python_and_no_file(source: str) -> None:
    with pytest.raises(TemplateError):
        rendered(source, user("a"))


def test_arguments_are_passed_as_objects() -> None:
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }};{% endfor %}"
    calls = [call("1", '{"a": [1, "é"]}'), call("2", '{"a": '), call("3", ""), call("4", "[1]")]
    result = assistant(None, calls)
    assert rendered(source, result) == '{"a": [1, "é"]};{"malformed": "{\\"a\\": "};{};{"malformed": "[1]"};'
    assert calls[0]["function"]["arguments"] == '{"a": [1, "é"]}'


def test_empty_values_of_a_client_are_treated_as_missing() -> None:
    source = "{{ 'tool_calls' in messages[0] }} {{ messages[0].content == '' }} {{ 'refusal' in messages[0] }}"
    message: Message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert rendered(source, message) == "False True False"
    assert rendered(source, {**message, "tool_calls": []}) == "False True False"


def test_missing_content_is_kept_if_the_template_checks_for_it() -> None:
    source = "{% if messages[0]['content'] is none %}call{% else %}text{% endif %}"
    assert rendered(source, assistant("", [call("1")])) == "call"
    assert rendered(source, assistant(None)) == "text"


def test_text_parts_are_joined_unless_the_template_iterates_over_parts() -> None:
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    through_parts = "{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}"
    assert rendered("{{ messages[0].content }}", parts) == "a\nb"
    assert rendered(through_parts, user("a")) == "[a]"
    chosen = (
        "{% for part in messages[0]['content'] | selectattr('type', 'equalto', 'text') %}[{{ part.text }}]{% endfor %}"
    )
    assert rendered(chosen, user("a")) == "[a]"
    assert rendered("{% if messages[0].content is string %}x{% endif %}" + through_parts, parts).startswith("x")
    picture: Message = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    assert rendered("{{ messages[0].content[0].type }}", picture) == "image_url"


def test_reasoning_is_passed_under_both_names() -> None:
    source = "{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}"
    assert rendered(source, {"role": "assistant", "content": "", "reasoning": "a"}) == "aa"
    assert rendered(source, {"role": "assistant", "content": "", "reasoning_content": "a", "reasoning": None}) == "aa"


def test_template_that_requires_short_call_ids_gets_them() -> None:
    source = (
        "{% if messages[0].tool_call_id | length != 9 %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0].tool_call_id }}"
    )
    assert rendered(source, tool("call_0123456789", "x")) == "123456789"


def test_conversation_is_rendered_as_qwen_publishes_it() -> None:
    messages = [
        system("Be kind."),
        user("Find é."),
        assistant(None, [call("1", '{"query":"é"}'), call("2")]),
        tool("1", "one"),
        tool("2", "two"),
    ]
    text = CHATML.text().template.render(messages, [SEARCH], generation_prompt=True)
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\nFind é.<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_date_can_be_set() -> None:
    text = LLAMA31.text().template.render([user("a")], (), generation_prompt=True, date_string="1 Jan 2026")
    assert "Today Date: 1 Jan 2026" in text
