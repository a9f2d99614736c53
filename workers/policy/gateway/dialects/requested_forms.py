"""Parses the requested form of an answer in each API: a tool call or none, or text of a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.google_schemas import camel, json_schema
from workers.policy.gateway.dialects.model_api import BadRequest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_SHOWN = 100
Mode = Literal["auto", "none", "required"]
ANY_OBJECT = {"type": "object"}
_WORDS: dict[str, Mode] = {"auto": "auto", "none": "none", "required": "required"}
_ANTHROPIC: dict[str, Mode] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_GOOGLE: dict[str, Mode] = {
    "MODE_UNSPECIFIED": "auto",
    "AUTO": "auto",
    "VALIDATED": "auto",
    "NONE": "none",
    "ANY": "required",
}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A tool choice: `allowed` are the tools that may be called, empty for all."""

    mode: Mode = "auto"
    allowed: tuple[str, ...] = ()

    def checked(self, tools: Sequence[ChatCompletionToolParam], left_out: Sequence[str], name: str) -> ToolChoice:
        """Return it. Raises BadRequest for a choice among missing tools, and if all tools were hidden."""
        there = {tool["function"]["name"] for tool in tools}
        if self.mode == "required" and not there:
            raise BadRequest("there is no tool to call", name)
        for each in self.allowed:
            if each not in there:
                raise BadRequest(f"there is no tool {each[:_SHOWN]!r}", name)
        if left_out and not there:
            names = ", ".join(each[:_SHOWN] for each in left_out[:8])
            raise BadRequest(f"none of the tools can be run here: {names}", "tools")
        return self


def of_openai(value: object, *, flat: bool) -> ToolChoice:
    """Return the choice of OpenAI's APIs; `flat`: a tool's name is next to its type, not in a nested object."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str) and value in _WORDS:
        return ToolChoice(_WORDS[value])
    if not isinstance(value, dict):
        raise BadRequest("must be auto, none, required, or name a tool", "tool_choice")
    if value.get("type") == "function":
        return ToolChoice("required", (_name_of(value, flat),))
    if value.get("type") == "allowed_tools":
        given = value if flat else value.get("allowed_tools")
        mode = given.get("mode") if isinstance(given, dict) else None
        if not isinstance(given, dict) or mode not in ("auto", "required"):
            raise BadRequest("allowed tools have the mode auto or required", "tool_choice.mode")
        tools = model_api.mappings(given.get("tools"), "tool_choice.tools")
        return ToolChoice(_WORDS[mode], tuple(_name_of(tool, flat) for tool in tools))
    raise BadRequest(f"a tool of type {value.get('type')!r} cannot be run here", "tool_choice")


def _name_of(value: Mapping[str, Any], flat: bool) -> str:
    holder = value if flat else value.get("function")
    if not isinstance(holder, dict):
        raise BadRequest("must name a function", "tool_choice.function")
    return model_api.word(holder.get("name"), "tool_choice.name")


def of_anthropic(value: object) -> ToolChoice:
    if value is None:
        return ToolChoice()
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _ANTHROPIC:
        raise BadRequest("must be an object of type auto, any, tool or none", "tool_choice")
    allowed = (model_api.word(value.get("name"), "tool_choice.name"),) if kind == "tool" else ()
    return ToolChoice(_ANTHROPIC[kind], allowed)


def of_google(value: object) -> ToolChoice:
    if value is None:
        return ToolChoice()
    where = "toolConfig.functionCallingConfig"
    config = camel(value).get("functionCallingConfig") if isinstance(value, dict) else 0
    if config is None:
        return ToolChoice()
    if not isinstance(config, dict):
        raise BadRequest("must be an object", where)
    config = camel(config)
    mode = config.get("mode") or "AUTO"
    if not isinstance(mode, str) or mode.upper() not in _GOOGLE:
        raise BadRequest("must be AUTO, ANY, NONE or VALIDATED", f"{where}.mode")
    return ToolChoice(
        _GOOGLE[mode.upper()], model_api.texts(config.get("allowedFunctionNames"), f"{where}.allowedFunctionNames")
    )


def schema_of_format(value: object, name: str, *, flat: bool) -> dict[str, Any] | None:
    """Return the schema of an OpenAI or Anthropic format; None for free text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest("must be an object of type text, json_object or json_schema", name)
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    holder = value if flat else value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest("must have a schema, an object", name)
    return schema


def schema_of_google(config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = config.get("responseMimeType")
    if kind not in (None, "", "text/plain", "application/json"):
        raise BadRequest("must be text/plain or application/json", "generationConfig.responseMimeType")
    if kind != "application/json":
        return None
    schema = config.get("responseJsonSchema")
    if schema is None:
        schema = json_schema(config.get("responseSchema"))
    if schema is not None and not isinstance(schema, dict):
        raise BadRequest("must be an object", "generationConfig.responseJsonSchema")
    return schema or ANY_OBJECT
