"""The form that a program requires of an answer: no tool call, at least one, text of a JSON schema, token texts.

It is part of the sampling. Engines that support guided decoding are made to follow it; their samples are recorded like
any other call, with the label `guided`. Any other engine samples freely, unless the form is `required`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from farm.records.request import SamplingParams

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolChoiceOptionParam
    from openai.types.shared_params import ResponseFormatJSONSchema

GUIDED = "guided"
"""The label of calls whose decoding was guided."""


class FormedSampling(SamplingParams):
    """The sampling parameters of one request with a required form of its answer."""

    tool_choice: Literal["none", "required"] | None = None
    """`none`: text is never parsed as a tool call."""
    tools_allowed: tuple[str, ...] = ()
    """The tools of which one must be called; empty for any."""
    answer_schema: dict[str, Any] | None = None
    """The JSON schema of the text."""
    spelled: bool = False
    """True to request the text of each token."""
    required: bool = False
    """True to refuse the request if the engine cannot guarantee the form."""
    guide: dict[str, Any] | None = None
    """The form as engines accept it, set once the model's tool format is known: `json_schema`, or
    `structural_tag`."""

    @property
    def needs_guide(self) -> bool:
        return self.tool_choice == "required" or self.answer_schema is not None


def guide(
    sampling: FormedSampling, tool_format: str, opened: bool, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the form as engines accept it; empty if calls in this format cannot be guided.

    `opened`: the prompt ends inside an open reasoning tag, which the answer closes first.
    """
    if sampling.tool_choice == "required":
        tags = [_call(tool_format, tool["function"]) for tool in tools if _allowed(sampling, tool["function"]["name"])]
        if not tags or not all(tags):
            return {}
        form: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
        form |= {"at_least_one": True, "stop_after_first": False}
    else:
        form = {"type": "json_schema", "json_schema": sampling.answer_schema}
        if not opened:
            return {"json_schema": sampling.answer_schema}
    if opened:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
        form = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "\n\n"}, form]}
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def guide_of(sampling: SamplingParams) -> Mapping[str, Any]:
    """Return the guide of a request to an engine; empty if it has none."""
    return (sampling.guide or {}) if isinstance(sampling, FormedSampling) else {}


def is_spelled(sampling: SamplingParams) -> bool:
    return isinstance(sampling, FormedSampling) and sampling.spelled


def chat_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of a chat request that specify the form."""
    if not isinstance(sampling, FormedSampling):
        return {}
    fields: dict[str, Any] = {}
    if sampling.tool_choice is not None:
        only = sampling.tools_allowed if sampling.tool_choice == "required" else ()
        choice: ChatCompletionToolChoiceOptionParam = sampling.tool_choice
        if len(only) == 1:
            choice = {"type": "function", "function": {"name": only[0]}}
        fields["tool_choice"] = choice
    if sampling.answer_schema is not None:
        response_format: ResponseFormatJSONSchema = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": sampling.answer_schema},
        }
        fields["response_format"] = response_format
    return fields


def _allowed(sampling: FormedSampling, name: str) -> bool:
    return not sampling.tools_allowed or name in sampling.tools_allowed


def _call(tool_format: str, function: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tag of a call in a format; None for formats whose calls cannot be guided."""
    if tool_format != "hermes":
        return None
    begin = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
    schema = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
    return {"type": "tag", "begin": begin, "content": schema, "end": "}\n</tool_call>"}
