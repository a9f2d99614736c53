"""Schemas of tool arguments as a model sees them, and the messages about arguments that do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from farm.errors import AgentError, ToolError
from farm.records.trajectory import ToolCall
from farm.settings import Settings
from tests.services.soak import at_length
from workers.agents.actions import InvalidCall, parse, schemas
from workers.plugins.interfaces import Observation, Sandbox, Tool
from workers.testing import FakeSandbox
from workers.tools import Arguments
from workers.tools.bash import BashTool
from workers.tools.edit import EditTool
from workers.tools.python import PythonTool
from workers.tools.search import SearchTool
from workers.tools.submit import SubmitTool
from workers.tools.think import ThinkTool

NOBODY = "searxng:http://127.0.0.1:9"
MAKERS: dict[str, Callable[[Sandbox | None], Tool]] = {
    "bash": BashTool,
    "edit": EditTool,
    "python": PythonTool,
    "search": lambda sandbox: SearchTool(sandbox, Settings(search=NOBODY)),
    "submit": SubmitTool,
    "think": ThinkTool,
}
every_tool = pytest.mark.parametrize("name", MAKERS)


class Described(BaseModel):
    """The allowed schema of an argument: what LLM servers accept of JSON Schema 2020-12, and no more."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["string", "integer", "number", "boolean", "array"]
    description: str = Field(min_length=1)
    default: Any = None
    enum: list[str] = Field(default_factory=list)
    items: dict[Literal["type"], Literal["string", "integer"]] = Field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None
    minLength: int | None = None  # noqa: N815  (so it is called there)
    maxLength: int | None = None  # noqa: N815
    minItems: int | None = None  # noqa: N815
    maxItems: int | None = None  # noqa: N815


class Parameters(BaseModel):
    """The schema of a tool's arguments."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["object"]
    properties: dict[str, Described]
    required: list[str] = []
    additionalProperties: Literal[False]  # noqa: N815


class Sample(Arguments):
    """One argument of each kind."""

    command: Literal["view", "create"]
    text: str = ""
    number: int = 3
    yes: bool = False
    rows: list[int] | None = None


class SampleTool(ThinkTool):
    arguments: ClassVar[type[BaseModel]] = Sample


def parsed(text: str) -> Sample:
    tool: Tool = SampleTool(None)
    return cast(Sample, parse(ToolCall("1", "sample", text), {"sample": tool})[1])


def complaint(text: str) -> str:
    with pytest.raises(InvalidCall) as raised:
        parsed(text)
    return str(raised.value)


@every_tool
def test_schema_is_accepted_by_llm_servers(name: str) -> None:
    function = schemas({name: MAKERS[name](None)})[0]["function"]
    shape = Parameters.model_validate(function["parameters"])
    assert set(shape.required) <= set(shape.properties)
    assert all(described.items for described in shape.properties.values() if described.type == "array")
    assert json.loads(json.dumps(function)) == function


@every_tool
def test_unknown_argument_is_refused(name: str) -> None:
    tool = MAKERS[name](None)
    needed = {
        field: described.enum[0] if described.enum else "x"
        for field, described in Parameters.model_validate(tool.arguments.model_json_schema()).properties.items()
        if tool.arguments.model_fields[field].is_required()
    }
    with pytest.raises(InvalidCall, match="frobnicate: unknown"):
        parse(ToolCall("1", name, json.dumps({**needed, "frobnicate": 1})), {name: tool})


def test_unambiguous_deviations_are_accepted() -> None:
    assert parsed('{"command": "view"}') == Sample(command="view")
    taken = parsed('{"command": "view", "text": null, "number": null, "yes": null, "rows": null}')
    assert taken == Sample(command="view")
    assert parsed('{"command": "view", "number": "5", "yes": "true"}') == Sample(command="view", number=5, yes=True)
    assert parsed('{"command": "view", "text": "\\ud83d\\ude00"}').text == "😀"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "command: required, but missing"),
        ("", "command: required, but missing"),
        ("{'command': 'view'}", "are not JSON"),
        ("[1]", "arguments: must be one JSON object, not an array"),
        ("null", "arguments: must be one JSON object, not null"),
        ('"view"', 'arguments: must be one JSON object, not "view"'),
        ('"{\\"command\\": \\"view\\"}"', "a JSON object inside a string; send the object itself"),
        ('{"command": "vew"}', "command: must be one of 'view' or 'create', not \"vew\""),
        ('{"command": null}', "command: must be one of 'view' or 'create', not null"),
        ('{"comand": "view"}', "comand: unknown; did you mean `command`?"),
        ('{"command": "view", "x": 1}', "the tool takes `command`, `text`, `number`, `yes`, `rows`; x: unknown"),
        ('{"command": "view", "text": 5}', "text: must be text, a JSON string, not 5"),
        ('{"command": "view", "text": {"a": 1}}', "text: must be text, a JSON string, not an object"),
        ('{"command": "view", "number": "many"}', 'number: must be a whole number, not "many"'),
        ('{"command": "view", "number": 1.5}', "number: must be a whole number, not 1.5"),
        ('{"command": "view", "number": 1e400}', "number: must be a finite number, not Infinity"),
        ('{"command": "view", "yes": "maybe"}', 'yes: must be true or false, not "maybe"'),
        ('{"command": "view", "rows": "[1, 2]"}', 'rows: must be a JSON array, not "[1, 2]"'),
        ('{"command": "view", "rows": [1, null]}', "rows.1: must be a whole number, not null"),
        ('{"command": "view", "text": "\\ud800"}', "text: holds '\\ud800', half of a pair of surrogates"),
        ('{"command": "view", "\\ud800": 1}', '"\\ud800": unknown'),
        ("9" * 5000, "are not JSON"),
        ("[" * 100_000, "are not JSON"),
    ],
)
def test_complaint_names_the_necessary_change(text: str, expected: str) -> None:
    assert expected in complaint(text)


def test_complaint_is_short() -> None:
    assert len(complaint(json.dumps({f"{'x' * 500}{number}": 1 for number in range(10_000)}))) < 1000
    assert "there is more wrong with them" in complaint('{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}')
    assert len(complaint(json.dumps({"command": "x" * 1_000_000}))) < 300
    assert len(complaint(json.dumps({"command": "view", "rows": ["x" * 500] * 1000}))) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = ("/a.txt", "/none", "/", "/a.txt/", "//a.txt", "a.txt", "", "/a\0b", "/a\nb", "/é", "/\ud800")
TEXTS = ("", "a", "one", "two\n", "one\r\n", "     1\tone", "\0", "\ud800", "x" * 5000)


def arguments_of(name: str) -> st.SearchStrategy[Any]:
    """Anything, and objects similar to valid arguments."""
    properties = MAKERS[name](None).arguments.model_json_schema()["properties"]
    close = {
        field: st.sampled_from(described.get("enum", PATHS if field == "path" else TEXTS))
        | st.integers(-2, 9)
        | st.lists(st.integers(-2, 9), max_size=3)
        | JSON
        for field, described in properties.items()
    }
    return JSON | st.fixed_dictionaries({}, optional=close)


@pytest.mark.soak
@every_tool
@given(data=st.data())
@examples(max_examples=at_length(50, 1500), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_arguments_of_a_model_are_answered(name: str, data: st.DataObject) -> None:
    asyncio.run(answered(name, json.dumps(data.draw(arguments_of(name)))))


@pytest.mark.soak
@every_tool
@given(text=st.text() | st.text(st.sampled_from('{}[]",:\\u0123dD8 atruefalsn\n')))
@examples(max_examples=at_length(50, 1500), deadline=None)
def test_arguments_that_are_not_json_are_answered(name: str, text: str) -> None:
    asyncio.run(answered(name, text))


async def answered(name: str, text: str) -> None:
    sandbox = FakeSandbox()
    sandbox.files["/a.txt"] = b"one\ntwo\ntwo\n"
    tool = MAKERS[name](sandbox)
    try:
        made, arguments = parse(ToolCall("1", name, text), {name: tool})
        observation = await made.call(arguments, 0.05)
        assert isinstance(observation, Observation)
        result = observation.text
    except ToolError as error:
        result = str(error)
    except AgentError as error:
        assert name == "search"  # no server listens there: that is the farm's fault, whatever the model sent
        result = str(error)
    finally:
        await tool.close()
    result.encode()
