"""The fields of each API's requests: which ones take effect, are refused or may be ignored, and the requested form.

A field that carries conversation, or constrains the answer, is never ignored. A field in no table is recorded with the
call, as `unknown_fields`; the vendors' own clients send none. A form is a tool call or none, or text of a JSON schema;
Google's schemas, OpenAPI schemas with upper-case types, are converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import BadRequest

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_SAMPLING = "the batch sets the sampling, as the log-probabilities must be the policy's; recorded with the call"
_EFFORT = "the batch sets the model's thinking, by chat_template_kwargs; recorded with the call"
_SERVICE = "for the vendor's service: prices, caches, safety and regions"

_WHOLE = "a conversation is never shortened here: the policy sees all of it"
_PARALLEL = "the policy chooses the number of calls in a turn; recorded with the call"
_ENCODING = "about the answer's encoding, not its content"
_HOSTED = "for tools that the vendor runs, which are not supported"
_STRICT = "the policy's output is never repaired: its program checks it; the batch decides whether a schema is enforced"
_OUTPUT = "a chat template shows a function's parameters, never its results"
_CALLER = "the policy calls all functions itself"
_NAMES = "for the vendor's models: no chat template has a place for it"
_TOP_LOGPROBS = "log-probabilities are known only for the sampled tokens"
_NUMBERS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minimum", "maximum"}
)
_OF_THE_VENDOR = frozenset({"nullable", "propertyOrdering", "example"})
_DOLLAR_NAMES = {"defs": "$defs", "ref": "$ref"}
_NULL = {"type": "null"}
_DEPTH = 64
_SNAKE = re.compile(r"_([a-z])")
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
class RequestFields:
    """The fields of one kind of object in requests."""

    handled: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Name to remedy. A neutral value, such as null, is accepted."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Name to the reason why nothing is lost by ignoring it."""

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        """Return the names of a request's fields that are in no table. Raises BadRequest for refused ones."""
        model_api.refuse(body, self.refused)
        return sorted(body.keys() - self.handled - self.refused.keys() - self.ignored.keys())


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


CHAT = RequestFields(
    _named(
        "messages tools tool_choice response_format model n stream stream_options max_tokens max_completion_tokens stop"
        " modalities user metadata safety_identifier logprobs"
    ),
    {
        "functions": "send functions as tools",
        "function_call": "send functions as tools, and choose them by tool_choice",
        "audio": "only text answers are supported",
        "web_search_options": "search is not supported",
        "top_logprobs": _TOP_LOGPROBS,
    },
    {
        **_because(_SAMPLING, "temperature top_p seed logit_bias presence_penalty frequency_penalty"),
        **_because(_EFFORT, "reasoning_effort verbosity"),
        **_because(_PARALLEL, "parallel_tool_calls"),
        **_because(_SERVICE, "store service_tier moderation prompt_cache_key prompt_cache_options"),
        **_because(_SERVICE, "prompt_cache_retention"),
        "prediction": "only makes an answer faster",
    },
)
CHAT_MESSAGE = RequestFields(
    _named("role content tool_calls tool_call_id reasoning_content reasoning refusal"),
    {"audio": "only text is supported", "function_call": "send calls as tool_calls"},
    {"name": "chat templates have roles, but no names"},
)
RESPONSES = RequestFields(
    _named(
        "input instructions previous_response_id tools tool_choice text model stream max_output_tokens store metadata"
        " include user safety_identifier parallel_tool_calls reasoning stop temperature top_p"
    ),
    {
        "conversation": "conversations are stored by response: send previous_response_id, or all messages",
        "prompt": "stored prompts are not supported: send the text as instructions and input",
        "background": "background answers are not supported: wait for the answer",
        "background_options": "background answers are not supported: wait for the answer",
        "top_logprobs": _TOP_LOGPROBS,
    },
    {
        **_because(_SERVICE, "service_tier moderation prompt_cache_key prompt_cache_options prompt_cache_retention"),
        **_because(_SERVICE, "access_programs image"),
        **_because(_WHOLE, "truncation context_management"),
        **_because(_ENCODING, "stream_options"),
        **_because(_HOSTED, "max_tool_calls"),
        **_because("for token counts, which are estimates here", "personality"),
    },
)
"""The handled sampling parameters are echoed in the answer, as in this API."""
ITEM = RequestFields(
    _named("type role content call_id name namespace arguments output summary"),
    {},
    {
        **_because("for items as returned by the API", "id status phase"),
        **_because(_CALLER, "caller async"),
        "encrypted_content": "the summary or the content has the reasoning; encryption is not supported",
    },
)
MESSAGES = RequestFields(
    _named(
        "messages system tools tool_choice model stream max_tokens stop_sequences thinking thread output_config"
        " metadata mcp_servers output_format"
    ),
    {
        "compaction": "summaries are not supported: send the messages that the model should see",
        "container": "containers are not supported",
    },
    {
        **_because(_SAMPLING, "temperature top_p top_k"),
        **_because(_SERVICE, "cache_control service_tier inference_geo speed diagnostics user_profile_id workspace_id"),
        **_because(_SERVICE, "betas billing_policy fallbacks fallback_credit_token"),
        **_because(_WHOLE, "context_management"),
    },
)
MESSAGE = RequestFields(
    _named("role content"),
    {
        "clear_at": "conversations are never shortened: omit what the model should not see",
        "output_config": "the form applies to one request: set output_config on the request",
    },
)
BLOCK = RequestFields(
    _named("type text thinking id name input tool_use_id content"),
    {},
    {
        **_because(_SERVICE, "cache_control"),
        "citations": "the text says what is cited",
        "toolset_name": "for the vendor's sets of tools, which are not supported",
        "signature": "signatures are not used",
        "data": "thinking that only the vendor can read",
        "caller": _CALLER,
        "is_error": "chat templates have no place for it: the result's text says what failed",
    },
)
GOOGLE = RequestFields(
    _named("contents systemInstruction tools toolConfig generationConfig model stream labels"),
    {
        "cachedContent": "content caches are not supported: send the contents that the model should see",
        "continuationToken": "continued answers are not supported: send the contents that the model should see",
    },
    _because(_SERVICE, "safetySettings serviceTier store modelArmorConfig"),
)
GOOGLE_CONFIG = RequestFields(
    _named("candidateCount maxOutputTokens stopSequences responseModalities thinkingConfig responseMimeType")
    | _named("responseSchema responseJsonSchema responseLogprobs"),
    {
        "speechConfig": "only text answers are supported",
        "translationConfig": "only text answers are supported",
        "responseFormat": "set the schema as responseJsonSchema",
        "imageConfig": "only text answers are supported",
        "audioTranscriptionConfig": "only text is supported",
        "logprobs": _TOP_LOGPROBS,
    },
    {
        **_because(_SAMPLING, "temperature topP topK seed presencePenalty frequencyPenalty"),
        **_because(_SERVICE, "enableEnhancedCivicAnswers routingConfig modelSelectionConfig"),
        **_because("only text is supported", "mediaResolution audioTimestamp enableAffectiveDialog"),
        **_because(_ENCODING, "generationOutputConfig"),
    },
)
GOOGLE_PART = RequestFields(
    _named("text thought functionCall functionResponse"),
    _because(
        "only text, function calls and their responses are supported",
        "inlineData fileData executableCode codeExecutionResult toolCall toolResponse audioTranscription",
    ),
    {
        "thoughtSignature": "signatures are not used",
        **_because(
            "about media, which are not supported", "videoMetadata mediaResolution mediaProcessing audioMetadata"
        ),
        **_because("about media, which are not supported", "speechMetadata documentMetadata spreadsheetMetadata"),
        "partMetadata": "the client's own",
    },
)
GOOGLE_CONTENT = RequestFields(_named("parts role"))
GOOGLE_CALL = RequestFields(
    _named("id name args"),
    {"partialArgs": "partial calls are not supported: send their arguments as args"},
    {"willContinue": "partial calls are not supported"},
)
GOOGLE_RESULT = RequestFields(
    _named("id name response"),
    {"parts": "only text results are supported"},
    _because("results are shown in order", "willContinue scheduling"),
)
GOOGLE_TOOL = RequestFields(
    _named("functionDeclarations"),
    {},
    _because(
        _HOSTED,
        "retrieval computerUse fileSearch googleSearch googleMaps codeExecution enterpriseWebSearch urlContext"
        " googleSearchRetrieval parallelAiSearch mcpServers exaAiSearch",
    ),
)
GOOGLE_FUNCTION = RequestFields(
    _named("name description parameters parametersJsonSchema"),
    {},
    {**_because(_OUTPUT, "response responseJsonSchema"), "behavior": "results are shown in order"},
)
GOOGLE_TOOL_CONFIG = RequestFields(
    _named("functionCallingConfig"), {}, _because(_HOSTED, "retrievalConfig includeServerSideToolInvocations")
)
GOOGLE_CALLING = RequestFields(
    _named("mode allowedFunctionNames"), {}, _because(_ENCODING, "streamFunctionCallArguments")
)
GOOGLE_THINKING = RequestFields(_named("includeThoughts"), {}, _because(_EFFORT, "thinkingBudget thinkingLevel"))

TEXT_PART = RequestFields(
    _named("type text refusal"),
    {},
    {
        **_because(_SERVICE, "prompt_cache_breakpoint"),
        **_because("of an answer as the API returned it: its text is what is shown", "annotations logprobs"),
    },
)
"""A text part of a message, tool result or thought, in both OpenAI APIs."""
CHAT_CALL = RequestFields(_named("id type function"))
CHAT_CALLED = RequestFields(_named("name arguments"))
CHAT_TOOL = RequestFields(_named("type function"))
CHAT_FUNCTION = RequestFields(_named("name description parameters"), {}, {"strict": _STRICT})
RESPONSES_TOOL = RequestFields(
    _named("type name description parameters tools"),
    {},
    {
        "strict": _STRICT,
        "output_schema": _OUTPUT,
        "defer_loading": "all functions are shown from the beginning",
        **_because(_CALLER, "allowed_callers async"),
    },
)
"""A function, or a namespace with functions in its `tools`."""
MESSAGES_TOOL = RequestFields(
    _named("type name description input_schema input_examples"),
    {},
    {
        "strict": _STRICT,
        "cache_control": _SERVICE,
        "defer_loading": "all functions are shown from the beginning",
        "allowed_callers": _CALLER,
        "eager_input_streaming": _ENCODING,
    },
)
TOOL_CHOICE = RequestFields(
    _named("type name function allowed_tools mode tools"), {}, _because(_PARALLEL, "disable_parallel_tool_use")
)
"""A tool choice and its contents, in OpenAI's APIs and Anthropic's."""
FORMAT = RequestFields(
    _named("type json_schema schema"), {}, {"strict": _STRICT, **_because(_NAMES, "name description")}
)
"""The form of an answer, in OpenAI's APIs and Anthropic's."""
TEXT_CONFIG = RequestFields(_named("format"), {}, {"verbosity": _EFFORT})
REASONING = RequestFields(frozenset(), {}, _because(_EFFORT, "effort summary generate_summary context mode"))
STREAM_OPTIONS = RequestFields(_named("include_usage"), {}, _because(_ENCODING, "include_obfuscation"))
THINKING = RequestFields(
    _named("type"),
    {},
    {
        "budget_tokens": _EFFORT,
        "display": "requested thinking is always shown",
        "block_binding": "signatures are not used",
    },
)
OUTPUT_CONFIG = RequestFields(_named("format"), {}, {"effort": _EFFORT, "task_budget": "the batch's own limits apply"})
THREAD = RequestFields(_named("type previous_message_id"))
METADATA = RequestFields(_named("user_id"))
MCP_SERVER = RequestFields(_named("name"), {}, _because(_HOSTED, "type url authorization_token tool_configuration"))


def camel(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its keys in camel case; the API accepts snake case, too."""
    return {_SNAKE.sub(lambda match: match[1].upper(), name): value for name, value in fields.items()}


def json_schema(schema: object, depth: int = 0) -> dict[str, Any] | None:
    """Return a schema as a JSON schema; None for an invalid one."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return None
    schema = camel(schema)
    converted = {
        _DOLLAR_NAMES.get(name, name): _field(_DOLLAR_NAMES.get(name, name), value, depth)
        for name, value in schema.items()
        if name not in _OF_THE_VENDOR
    }
    if schema.get("nullable") is not True:
        return converted
    if isinstance(converted.get("type"), str):
        return converted | {"type": [converted["type"], "null"]}
    if isinstance(converted.get("anyOf"), list):
        return converted | {"anyOf": [*converted["anyOf"], _NULL]}
    if "$ref" in converted:
        return {name: value for name, value in converted.items() if name != "$ref"} | {
            "anyOf": [{"$ref": converted["$ref"]}, _NULL]
        }
    return converted


def _field(name: str, value: Any, depth: int) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "$ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/")
    if name in ("properties", "$defs") and isinstance(value, dict):
        return {each: json_schema(schema, depth + 1) or {} for each, schema in value.items()}
    if name in ("items", "additionalProperties") and isinstance(value, dict):
        return json_schema(value, depth + 1) or {}
    if name in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
        return [json_schema(each, depth + 1) or {} for each in value]
    if name in _NUMBERS and isinstance(value, str) and value.lstrip("-").isascii() and value.lstrip("-").isdecimal():
        # The API writes 64-bit integers as text.
        return int(value)
    return value


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A tool choice: `allowed` are the tools that may be called, empty for all."""

    mode: Mode = "auto"
    allowed: tuple[str, ...] = ()

    def checked(self, tools: Sequence[ChatCompletionToolParam], left_out: Sequence[str], name: str) -> ToolChoice:
        """Return it. Raises BadRequest for a choice among missing tools, and if all tools were hidden."""
        offered = {tool["function"]["name"] for tool in tools}
        if self.mode == "required" and not offered:
            raise BadRequest("there is no tool to call", name)
        for each in self.allowed:
            if each not in offered:
                raise BadRequest(f"there is no tool {each[:_SHOWN]!r}", name)
        if left_out and not offered:
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
        allowed = value if flat else value.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if not isinstance(allowed, dict) or mode not in ("auto", "required"):
            raise BadRequest("allowed tools have the mode auto or required", "tool_choice.mode")
        tools = model_api.mappings(allowed.get("tools"), "tool_choice.tools")
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
    path = "toolConfig.functionCallingConfig"
    config = camel(value).get("functionCallingConfig") if isinstance(value, dict) else 0
    if config is None:
        return ToolChoice()
    if not isinstance(config, dict):
        raise BadRequest("must be an object", path)
    config = camel(config)
    mode = config.get("mode") or "AUTO"
    if not isinstance(mode, str) or mode.upper() not in _GOOGLE:
        raise BadRequest("must be AUTO, ANY, NONE or VALIDATED", f"{path}.mode")
    return ToolChoice(
        _GOOGLE[mode.upper()], model_api.texts(config.get("allowedFunctionNames"), f"{path}.allowedFunctionNames")
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
