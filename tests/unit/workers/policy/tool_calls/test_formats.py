# ruff: noqa: RUF001
"""Each format's calls as its models write them, and the handling of malformed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farm.errors import InvalidRequest
from farm.records.trajectory import ToolCall
from workers.policy.tool_calls import FORMATS, Parsed, detect, parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "line": {"type": "integer"},
                    "force": {"type": "boolean"},
                    "rows": {"type": "array", "items": {"type": "integer"}},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "any": {},
                },
            },
        },
    }
]

SEP = "<｜tool▁sep｜>"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# one call of bash with {"command": "ls -l"}, then one of submit with no arguments
TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=submit>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "bash", "parameters": {"command": "ls -l"}}; {"name": "submit", "parameters": {}}',
    "mistral": '[TOOL_CALLS]bash[ARGS]{"command": "ls -l"}[TOOL_CALLS]submit[ARGS]{}',
    "deepseek": f'{ALL_BEGIN}{BEGIN}bash{SEP}{{"command": "ls -l"}}{END}{BEGIN}submit{SEP}{{}}{END}{ALL_END}',
    "pythonic": '[bash(command="ls -l"), submit()]',
    "glm": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls -l</arg_value>\n</tool_call>\n"
    "<tool_call>submit\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
    '{"command": "ls -l"}<|tool_call_end|><|tool_call_begin|>functions.submit:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls -l</parameter>\n</invoke>\n'
    '<invoke name="submit">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n'
    '<｜DSML｜parameter name="command" string="true">ls -l</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="submit">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
    '{"command": "ls -l"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.submit <|constrain|>json<|message|>{}<|call|>",
    "gemma4": '<|tool_call>call:bash{command:<|"|>ls -l<|"|>}<tool_call|><|tool_call>call:submit{}<tool_call|>',
}
REASONING = {
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
OTHER_WAYS = {
    "no space": ("hermes", '<tool_call>{"name":"bash","arguments":{"command":"ls -l"}}</tool_call>'),
    "no end marker": ("hermes", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n'),
    "object in a string": (
        "hermes",
        '<tool_call>{"name":"bash","arguments":"{\\"command\\":\\"ls -l\\"}"}</tool_call>',
    ),
    "no outer marker": ("qwen_xml", "<function=bash>\n<parameter=command>\nls -l\n</parameter>\n</function>"),
    "only the outer end": (
        "qwen_xml",
        "<function=bash><parameter=command>ls -l</parameter></function>\n</tool_call>",
    ),
    "after a tag": ("llama3_json", '<|python_tag|>{"name": "bash", "parameters": {"command": "ls -l"}}'),
    "type first": ("llama3_json", '{"type": "function", "name": "bash", "parameters": {"command": "ls -l"}}'),
    "an array": ("mistral", '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls -l"}, "id": "a1B2c3D4e"}]'),
    "an id": ("mistral", '[TOOL_CALLS]bash[CALL_ID]a1B2c3D4e[ARGS]{"command": "ls -l"}'),
    "no marker of arguments": ("mistral", '[TOOL_CALLS]bash{"command": "ls -l"}'),
    "a fenced block": (
        "deepseek",
        f'{ALL_BEGIN}{BEGIN}function{SEP}bash\n```json\n{{"command": "ls -l"}}\n```{END}{ALL_END}',
    ),
    "no closing": ("deepseek", f'{ALL_BEGIN}{BEGIN}bash{SEP}{{"command": "ls -l"}}{ALL_END}'),
    "a recipient in the head": (
        "gpt_oss",
        '<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>{"command": "ls -l"}<|call|>',
    ),
    "a recipient in the head that the prompt began": (
        "gpt_oss",
        ' to=functions.bash<|channel|>commentary <|constrain|>json<|message|>{"command": "ls -l"}',
    ),
    "between markers": ("pythonic", "<|python_start|>[bash(command='ls -l')]<|python_end|>"),
    "over lines": ("pythonic", '[\n  bash(\n    command="""ls -l""",\n  ),\n]'),
}


def parsed(name: str, text: str, **options: Any) -> Parsed:
    return parser(name, **options).parse(text)


def only_call(name: str, text: str, **options: Any) -> tuple[ToolCall, int]:
    result = parsed(name, text, **options)
    (call,) = result.tool_calls
    return call, result.n_invalid


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls_are_parsed(name: str) -> None:
    result = parsed(name, TWO_CALLS[name])
    assert [(call.name, json.loads(call.arguments)) for call in result.tool_calls] == [
        ("bash", {"command": "ls -l"}),
        ("submit", {}),
    ]
    assert (result.content, result.reasoning, result.n_invalid) == ("", "", 0)


@pytest.mark.parametrize(("name", "text"), OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_other_spellings_of_a_call_are_parsed(name: str, text: str) -> None:
    call, n_invalid = only_call(name, text)
    assert (call.name, json.loads(call.arguments), n_invalid) == ("bash", {"command": "ls -l"}, 0)
    assert call.call_id == ("a1B2c3D4e" if "a1B2c3D4e" in text else "")
    assert parsed(name, text).content == ""


@pytest.mark.parametrize("name", sorted(TWO_CALLS))
def test_reasoning_is_kept_and_never_searched_for_calls(name: str) -> None:
    opening, closing = REASONING.get(name, ("<think>", "</think>"))
    result = parsed(name, f"{opening}\nI could {TWO_CALLS[name]}\n{closing}\n\n{TWO_CALLS[name]}")
    assert result.reasoning == f"I could {TWO_CALLS[name]}"
    assert len(result.tool_calls) == 2
    assert result.content == ""


@pytest.mark.parametrize("name", sorted(set(TWO_CALLS) - {"llama3_json", "pythonic"}))
def test_text_around_calls_is_content(name: str) -> None:
    result = parsed(name, f"Let me look.\n\n{TWO_CALLS[name]}\n\nThat is all.")
    assert result.content == "Let me look.\nThat is all."
    assert len(result.tool_calls) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_markers_is_unchanged(name: str) -> None:
    for text in ("", "  \n", " 42.\n", "a < b, a[0] {x} <tool", "\tdef f(): ...\n"):
        assert parsed(name, text) == Parsed(text, "", (), 0)


class TestReasoning:
    def test_unclosed_reasoning_tag_makes_the_rest_reasoning(self) -> None:
        result = parsed("hermes", f"Hm. <think>I could {TWO_CALLS['hermes']}")
        assert result == Parsed("Hm.", f"I could {TWO_CALLS['hermes']}", (), 0)

    def test_reasoning_may_be_opened_by_the_prompt(self) -> None:
        assert parsed("none", "It is\n</think>\n\n42", opened=True) == Parsed("42", "It is", (), 0)
        assert parsed("none", "It is", opened=True) == Parsed("", "It is", (), 0)
        assert parsed("none", "\n<think>\nIt is</think>42", opened=True) == Parsed("42", "It is", (), 0)

    def test_parts_of_reasoning_are_joined_by_a_line_break(self) -> None:
        assert parsed("none", "<think>a</think> b <think> c </think>d") == Parsed("b\nd", "a\nc", (), 0)

    def test_reasoning_tags_are_those_of_the_template(self) -> None:
        text = "[THINK]a[/THINK]b"
        assert parsed("mistral", text) == Parsed("b", "a", (), 0)
        assert parsed("none", text, template="… [THINK] …") == Parsed("b", "a", (), 0)
        assert parsed("none", "a[/THINK]b", template="… [THINK] …", opened=True) == Parsed("b", "a", (), 0)
        assert parsed("hermes", text).content == text

    def test_tag_in_a_call_is_part_of_an_argument(self) -> None:
        call, _ = only_call("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>')
        assert json.loads(call.arguments) == {"a": "<think>"}


MALFORMED = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "f",
        '{"name": "f", "arguments": {"a": 1}',
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "f", '{"name": "f", "arguments": {"a": "b'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "", '{"arguments": {"a": 1}}'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "", '{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "[1]"),
    ("hermes", "<tool_call>\nls -l\n</tool_call>", "", "ls -l"),
    ("hermes", "<tool_call></tool_call>", "", ""),
    ("hermes", "<tool_call>", "", ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "f", '{"name": "f", "arguments": {}}}'),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1", "f", "<function=f>\n<parameter=a>\n1"),
    ("qwen_xml", "<tool_call>\nf\n</tool_call>", "", "f"),
    ("qwen_xml", "<tool_call><function=></function></tool_call>", "", "<function=></function>"),
    ("qwen_xml", "<function=f>a</function>", "f", "<function=f>a"),
    ("llama3_json", '{"name": "f", "parameters": {"a": ', "f", '{"name": "f", "parameters": {"a":'),
    ("llama3_json", "<|python_tag|>print(1)", "", "print(1)"),
    ("llama3_json", '<|python_tag|>{"parameters": {}}', "", '{"parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {', "f", '[{"name": "f", "arguments": {'),
    ("mistral", "[TOOL_CALLS][]", "", "[]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "", "f[ARGS]"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": }', "f", '{"a": }'),
    ("mistral", "[TOOL_CALLS]", "", ""),
    ("deepseek", f"{BEGIN}f", "", "f"),
    ("deepseek", f'{BEGIN}f{SEP}{{"a": 1{END}', "f", '{"a": 1'),
    ("deepseek", f"{BEGIN}f{SEP}{END}", "f", f"f{SEP}"),
    ("deepseek", f'{BEGIN}function{SEP}f\n```json\n{{"a": \n```{END}', "f", '{"a":'),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", "f", "{"),
    (
        "kimi_k2",
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        "f<|tool_call_argument_begin|>{}",
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "f", "{"),
    ("gpt_oss", "<|channel|>commentary to=functions.f", "", "functions.f"),
    ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{", "f", "{"),
    ("gpt_oss", "<|start|>assistant to=functions.f<|channel|>comm", "", "functions.f<|channel|>comm"),
    ("gpt_oss", " to=functions.f", "", "functions.f"),
    ("pythonic", "[f(a=", "f", "[f(a="),
    ("pythonic", "[f(1)]", "f", "f(1)"),
    ("pythonic", "[f(a=g())]", "f", "f(a=g())"),
    ("pythonic", "[f(a=1).b]", "", "f(a=1).b"),
    ("pythonic", '[f(a="é", b=x)]', "f", 'f(a="é", b=x)'),
    ("pythonic", "[f(**a)]", "f", "f(**a)"),
    ("pythonic", "[f(a=1e999)]", "f", "f(a=1e999)"),
    ("pythonic", "[f(a=b'x')]", "f", "f(a=b'x')"),
    ("pythonic", '[f(a=f"{1}")]', "f", 'f(a=f"{1}")'),
    ("pythonic", "[f(a={1: 2})]", "f", "f(a={1: 2})"),
    ("pythonic", "[f(a) for a in b]", "f", "[f(a) for a in b]"),
]


@pytest.mark.parametrize(("name", "text", "called", "raw"), MALFORMED)
def test_malformed_call_keeps_its_raw_text(name: str, text: str, called: str, raw: str) -> None:
    call, n_invalid = only_call(name, text)
    assert (call.name, call.arguments, n_invalid) == (called, raw, 1)
    assert parsed(name, text).content == ""


def test_well_formed_calls_next_to_malformed_ones_count() -> None:
    result = parsed("hermes", f"<tool_call>x</tool_call>{TWO_CALLS['hermes']}")
    assert ([call.name for call in result.tool_calls], result.n_invalid) == (["", "bash", "submit"], 1)
    result = parsed("pythonic", "[f(a=1), g(2), h(b=[1, 2.5, None, True, -3, {'a': (1,)}])]")
    assert [call.name for call in result.tool_calls] == ["f", "g", "h"]
    assert json.loads(result.tool_calls[2].arguments) == {"b": [1, 2.5, None, True, -3, {"a": [1]}]}
    assert result.n_invalid == 1


class TestHermes:
    def test_arguments_are_the_sampled_text(self) -> None:
        call, _ = only_call("hermes", '<tool_call>{"name":"f","arguments":{"b":1e5,  "a":"é\\u00e9"}}</tool_call>')
        assert call.arguments == '{"b":1e5,  "a":"é\\u00e9"}'

    def test_closing_marker_in_a_string_is_text(self) -> None:
        text = 'grep "</tool_call>" x'
        raw = json.dumps({"name": "bash", "arguments": {"command": text}})
        call, n_invalid = only_call("hermes", f"<tool_call>{raw}</tool_call>")
        assert (json.loads(call.arguments), n_invalid) == ({"command": text}, 0)

    @pytest.mark.parametrize("gap", ["", "\n", " text\n"])
    def test_unpaired_quotes_end_with_their_call(self, gap: str) -> None:
        bad = '<tool_call>{"name": "bash", "arguments": {"command": "say "hi}}</tool_call>'
        good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        result = parsed("hermes", f"{bad}{gap}{good}".rstrip())
        assert result.n_invalid == 1
        assert [call.name for call in result.tool_calls] == ["bash", "f"]
        assert result.content == gap.strip()

    def test_unclosed_call_ends_where_the_next_begins(self) -> None:
        result = parsed("hermes", '<tool_call>{"name": "f", "arguments": {}}\n' + TWO_CALLS["hermes"])
        assert ([call.name for call in result.tool_calls], result.n_invalid) == (["f", "bash", "submit"], 0)


class TestQwenXml:
    def arguments(self, name: str, value: str, **options: Any) -> Any:
        text = f"<tool_call>\n<function=edit>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        call, n_invalid = only_call("qwen_xml", text, **options)
        assert n_invalid == 0
        return json.loads(call.arguments)[name]

    @pytest.mark.parametrize(
        ("name", "value", "made"),
        [
            ("text", "5", "5"),
            ("text", '{"a": 1}', '{"a": 1}'),
            ("text", "", ""),
            ("text", "\n  a\n\n", "\n  a\n\n"),
            ("line", "5", 5),
            ("line", "five", "five"),
            ("force", "True", True),
            ("force", "false", False),
            ("rows", "[1, 2]", [1, 2]),
            ("note", "null", None),
            ("note", "5", "5"),
            ("size", "None", None),
            ("size", "1.5", 1.5),
            ("any", "5", "5"),
            ("any", "[5]", [5]),
            ("unknown", '{"a": [1]}', {"a": [1]}),
        ],
    )
    def test_schema_decides_the_type_of_values(self, name: str, value: str, made: Any) -> None:
        assert self.arguments(name, value, tools=TOOLS) == made

    @pytest.mark.parametrize(
        ("value", "made"), [("5", "5"), ("true", "true"), ("[1]", [1]), ("[1", "[1"), ('{"a": 1}', {"a": 1})]
    )
    def test_only_objects_and_arrays_are_parsed_without_a_schema(self, value: str, made: Any) -> None:
        assert self.arguments("line", value) == made

    @pytest.mark.parametrize(
        "value", ["</tool_call>", "a </parameter> b", "<tool_call>", "<function=f></function></tool_call>", "<think>"]
    )
    def test_value_may_contain_markers(self, value: str) -> None:
        assert self.arguments("text", value, tools=TOOLS) == value

    def test_unclosed_value_ends_with_its_call(self) -> None:
        text = "<tool_call><function=edit><parameter=text>x</function></tool_call>"
        result = parsed("qwen_xml", f"{text} after")
        assert (result.content, result.n_invalid, result.tool_calls[0].name) == ("after", 1, "edit")


TAGGED = {
    "qwen_xml": (
        *("<tool_call>\n<function=edit>\n", "\n</function>\n</tool_call>"),
        *("<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    ),
    "glm": (
        *("<tool_call>edit\n", "</tool_call>"),
        *("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    ),
    "minimax_m2": (
        *('<minimax:tool_call>\n<invoke name="edit">\n', "</invoke>\n</minimax:tool_call>"),
        *('<parameter name="{}">', "</parameter>\n", "</invoke>"),
    ),
    "deepseek_v32": (
        *('<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n', "</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
        *('<｜DSML｜parameter name="{}" string="true">', "</｜DSML｜parameter>\n", "</｜DSML｜invoke>"),
    ),
}
"""For formats with a tag for each parameter: the beginning of a call of `edit`, its end, the opening and the closing
tag of a parameter, and the tag that ends a call."""


@pytest.mark.parametrize("name", TAGGED)
class TestTags:
    def test_missing_closing_tag_is_reported(self, name: str) -> None:
        start, end, opening, closing, _ = TAGGED[name]
        first, second = opening.format("text"), opening.format("note")
        between = f"{start}{first}/a.py\n{second}print(1){closing}{end}"
        last = f"{start}{first}/a.py{closing}{second}print(1){end}"
        for text in (between, last, f"{between}\n{TWO_CALLS[name]}", f"{last}\n{TWO_CALLS[name]}"):
            result = parsed(name, text, tools=TOOLS)
            assert (result.n_invalid, result.tool_calls[0].name, result.content) == (1, "edit", "")
            assert "/a.py" in result.tool_calls[0].arguments
            assert [call.name for call in result.tool_calls[1:]] == ["bash", "submit"] * (TWO_CALLS[name] in text)

    def test_pairs_of_tags_in_a_value_are_reported(self, name: str) -> None:
        start, end, opening, closing, _ = TAGGED[name]
        first, pair = opening.format("text"), f"{opening.format('line')}1{closing}"
        for value in (pair, pair * 2, f"a {pair} b", f"a {pair} b {pair}", opening.format("line"), f"x {pair}"):
            result = parsed(name, f"{start}{first}{value}{closing}{end}", tools=TOOLS)
            assert result.n_invalid >= 1, value
            assert all("line" not in call.arguments[:10] for call in result.tool_calls)

    def test_duplicate_parameter_is_reported(self, name: str) -> None:
        start, end, opening, closing, _ = TAGGED[name]
        twice = f"{opening.format('text')}a{closing}" * 2
        assert parsed(name, f"{start}{twice}{end}", tools=TOOLS).n_invalid == 1

    def test_value_that_ends_its_own_call_is_reported(self, name: str) -> None:
        start, end, opening, closing, ends = TAGGED[name]
        value = f"close it by {closing}{ends} and go on"
        result = parsed(name, f"{start}{opening.format('text')}{value}{closing}{end}", tools=TOOLS)
        assert result.n_invalid == 1

    def test_cut_call_is_reported(self, name: str) -> None:
        start, _, opening, closing, _ = TAGGED[name]
        for text in (start, f"{start}{opening.format('text')}a", f"{start}{opening.format('text')}a{closing}"):
            result = parsed(name, text, tools=TOOLS)
            assert (result.n_invalid, len(result.tool_calls)) == (1, 1)

    def test_text_after_a_call_may_contain_other_tags(self, name: str) -> None:
        result = parsed(name, f"{TWO_CALLS[name]} <b>so</b> </p>", tools=TOOLS)
        assert (result.n_invalid, result.content) == (0, "<b>so</b> </p>")


class TestGemma:
    def test_values_are_parsed_by_their_notation(self) -> None:
        given = 'a:<|"|>x, "y" }<|"|>,b:-1.5,c:true,d:null,e:[1,<|"|>z<|"|>,[]],f:{<|"|>g h<|"|>:{},i:false}'
        call, n_invalid = only_call("gemma4", f"<|tool_call>call:edit{{{given}}}<tool_call|>")
        assert (call.name, n_invalid) == ("edit", 0)
        assert json.loads(call.arguments) == {
            **{"a": 'x, "y" }', "b": -1.5, "c": True, "d": None, "e": [1, "z", []]},
            "f": {"g h": {}, "i": False},
        }

    @pytest.mark.parametrize(
        "given", ["a:b", "a", "a:", "a:1,", "a:1 2", "a:1,a:2", '<|"|>a', "a:[1", "a:{", "a:NaN,", "}"]
    )
    def test_malformed_notation_is_reported(self, given: str) -> None:
        assert parsed("gemma4", f"<|tool_call>call:edit{{{given}}}<tool_call|>").n_invalid == 1


class TestLlama3Json:
    @pytest.mark.parametrize(
        "text", ['{"result": 5}', '{"name": "Ann", "age": 3}', "{x} is a set", '{"a": [1, 2', "Call {f}.", "{}", "{"]
    )
    def test_json_that_is_not_a_call_is_content(self, text: str) -> None:
        assert parsed("llama3_json", text) == Parsed(text, "", (), 0)

    def test_calls_must_come_first(self) -> None:
        call = '{"name": "f", "parameters": {}}'
        assert parsed("llama3_json", f"I would {call}").tool_calls == ()
        result = parsed("llama3_json", f"\n{call}\n{call}; and so on")
        assert (len(result.tool_calls), result.content) == (2, "and so on")


class TestPythonic:
    @pytest.mark.parametrize("text", ["[1, 2]", "[a](b)", "[see f(1)]", "[", "[f", "[don't (", "[ f.g"])
    def test_brackets_without_a_call_are_content(self, text: str) -> None:
        assert parsed("pythonic", text) == Parsed(text, "", (), 0)

    def test_strings_are_python_strings(self) -> None:
        call, n_invalid = only_call("pythonic", r"""[a.b(x='it"s)]', y="\d\n\"", z=r"\d", w='''a'b''', v="é")]""")
        assert (call.name, n_invalid) == ("a.b", 0)
        assert json.loads(call.arguments) == {"x": 'it"s)]', "y": '\\d\n"', "z": "\\d", "w": "a'b", "v": "é"}

    def test_json_literals_are_accepted(self) -> None:
        call, _ = only_call("pythonic", "[f(a=true, b=false, c=null)]")
        assert json.loads(call.arguments) == {"a": True, "b": False, "c": None}


TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n{\"name\": ' }}",
    "qwen_xml": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}',
    "mistral": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}",
    "pythonic": "You can call tools so:\n[func_name1(params_name1=params_value1, ...), ...]",
    "glm": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' + id }}",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "deepseek_v32": "{{ '<｜DSML｜function_calls>' }} {{ '<｜tool▁calls▁begin｜>' }}",
    "gpt_oss": "<|channel|>commentary to=functions.{{ name }} <|constrain|>json<|message|>",
    "gemma4": "{{ '<|tool_call>call:' + name + '{' }}",
    "none": "{{ message.content }}",
}


@pytest.mark.parametrize("name", FORMATS)
def test_template_decides_the_format(name: str) -> None:
    assert detect(TEMPLATES[name]) == name
    assert parser("", template=TEMPLATES[name]).parse("x") == Parsed("x", "", (), 0)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="hermes, qwen_xml"):
        parser("xml")
