"""The double compared with vLLM: the same requests get answers of the same shape, valid by vLLM's own schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator

from tests.doubles import EngineDouble
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

DATA = Path(__file__).parents[2] / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "vllm_wire" / "requests.json").read_text()) | json.loads(
    (DATA / "vllm_wire" / "more.json").read_text()
)
SCHEMAS = json.loads((DATA / "vllm_schemas.json").read_text())["classes"]
SHAPES = (
    "models",
    "version",
    "tokenize_chat",
    "tokenize_text",
    "detokenize",
    "chat_ids",
    "chat_lp0",
    "completions_tokin",
    "completions_n2",
    "generate_tokens",
    "generate_text",
    "stop_token",
    "stop_str",
    "err_len_edge",
    "prefix_0",
    "reset_prefix",
    "is_paused",
    "weight_info",
    "get_world_size",
    "load",
    "pause",
    "update_weight_version",
    "resume",
    "abort_some",
    "abort_all",
)
STREAMS = ("stream_completions", "stream_chat", "stream_generate")
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SCRIPT = Script(
    [
        ScriptedProblem(
            match="two",
            branches=(
                Branch(
                    name="calls",
                    turns=(
                        ScriptedTurn(
                            content="I look.",
                            reasoning="hm",
                            tool_calls=(
                                ScriptedCall(name="bash", arguments={"command": "echo 'ü'"}),
                                ScriptedCall(name="bash", arguments={"command": "ls"}),
                            ),
                        ),
                    ),
                ),
            ),
        ),
        ScriptedProblem(
            match="broken",
            branches=(
                Branch(name="no", turns=(ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments="{no"),)),)),
            ),
        ),
    ]
)


@pytest.fixture(scope="module")
def recorded() -> Iterator[httpx2.Client]:
    """Yield a client for recorded requests: its model has the name, context and blocks of the real one."""
    double = EngineDouble(model="tiny", context_tokens=1024, block_tokens=128, version="0.32.0", stream_tokens=1)
    with serving(double.app()) as url, httpx2.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with serving(EngineDouble(SCRIPT, model="tiny").app()) as url, httpx2.Client(base_url=url) as client:
        yield client


def shape(value: Any, name: str = "") -> Any:
    """Return the keys and types. Numbers are equal, and so are the texts of tokens used as keys."""
    if name == "bytes":
        return "of a token"
    if isinstance(value, dict):
        result = {key: shape(one, key) for key, one in value.items()}
        return sorted(set(result.values())) if name == "top_logprobs" and "logprob" not in result else result
    if isinstance(value, list):
        return sorted({json.dumps(shape(one, name)) for one in value})
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) else "text"


def body_of(entry: dict[str, Any]) -> Any:
    """Return the request as it was sent: lists that the recording shortened are long again."""

    def long(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: long(one) for name, one in value.items()}
        if isinstance(value, list) and (match := re.fullmatch(r"\.\.\. (\d+) in all", str(value[-1:] and value[-1]))):
            return [index * (value[1] - value[0]) % 250 + value[0] for index in range(int(match[1]))]
        if isinstance(value, str) and (match := re.search(r"\.\.\. (\d+) characters$", value)):
            return (value[0] + " ") * int(match[1])
        return [long(one) for one in value] if isinstance(value, list) else value

    request = entry["req"]
    return long(request.get("body", request) if "path" in request else request)


def ask(client: httpx2.Client, name: str) -> httpx2.Response:
    request = RECORDED[name]["req"]
    return client.request(
        request["method"], request["path"], json=body_of(RECORDED[name]), params=request.get("params") or {}
    )


@pytest.mark.parametrize("name", SHAPES)
def test_answers_have_the_recorded_shape(recorded: httpx2.Client, name: str) -> None:
    answer = ask(recorded, name)
    recorded.post("/resume")
    assert answer.status_code == RECORDED[name]["status"], answer.text
    assert shape(answer.json()) == shape(RECORDED[name]["resp"])


@pytest.mark.parametrize("name", ["err_model", "err_len", "err_vocab", "err_json"])
def test_refusals_equal_the_recorded_ones(recorded: httpx2.Client, name: str) -> None:
    answer = ask(recorded, name)
    assert answer.status_code == RECORDED[name]["status"]
    assert answer.json() == RECORDED[name]["resp"]


def test_too_long_chat_is_refused_as_recorded(recorded: httpx2.Client) -> None:
    response, expected = ask(recorded, "err_len_chat"), RECORDED["err_len_chat"]
    assert response.status_code == expected["status"]
    assert response.json()["error"]["message"].startswith(expected["resp"]["error"]["message"][:60])
    assert {**response.json()["error"], "message": ""} == {**expected["resp"]["error"], "message": ""}


def test_cached_token_counts_equal_the_recorded_ones(recorded: httpx2.Client) -> None:
    recorded.post("/reset_prefix_cache")
    body = {"prompt": [7 * index % 200 for index in range(601)], "max_tokens": 1}
    usages = [recorded.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 512]
    assert usages[1] == RECORDED["prefix_1"]["resp"]["usage"]
    salted = recorded.post("/v1/completions", json={**body, "cache_salt": "v2"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("name", "path"), zip(STREAMS, PATHS, strict=True))
def test_streams_have_the_recorded_shape(recorded: httpx2.Client, name: str, path: str) -> None:
    answer = recorded.post(path, json=body_of(RECORDED[name]))
    assert answer.headers["content-type"].startswith("text/event-stream")
    result, expected = events(answer.text), events("\n".join(RECORDED[name]["lines"]))
    assert len(result) == len(expected)
    for one, other in zip(result, expected, strict=True):
        # It depends on chance if a token is a whole character, and so has text to show.
        for event in (one, other):
            for choice in event["choices"]:
                choice.get("delta", {}).pop("content", None)
        assert shape(one) == shape(other)


def request_for(path: str, **more: Any) -> dict[str, Any]:
    if path.startswith("/v1/chat"):
        ask = {"messages": [{"role": "user", "content": "two"}], "tools": TOOLS, "logprobs": True}
        return {**ask, "return_token_ids": True, "seed": 1, **more}
    if path == "/v1/completions":
        return {"prompt": [5, 9, 11], "logprobs": 0, "return_token_ids": True, "seed": 1, "max_tokens": 50, **more}
    return {"token_ids": [5, 9, 11], "sampling_params": {"logprobs": 0, "seed": 1}, "return_token_ids": True, **more}


CLASSES = dict(
    zip(PATHS, (("Completion", ""), ("ChatCompletion", ""), ("GenerateTokens", "")), strict=True),
)


@pytest.mark.parametrize("path", PATHS)
def test_answers_validate_against_the_published_classes(client: httpx2.Client, path: str) -> None:
    name = CLASSES[path][0]
    body = request_for(path)
    Draft202012Validator(SCHEMAS[f"{name.replace('Tokens', '')}Request"]).validate(body)
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    Draft202012Validator(SCHEMAS[f"{name}Response"]).validate(answer.json())
    stream = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    result = events(stream.text)
    assert len(result) > 3
    for event in result:
        Draft202012Validator(SCHEMAS[f"{name}StreamResponse"]).validate(event)


def test_other_answers_validate_against_the_published_classes(client: httpx2.Client) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    result = {
        "ModelList": client.get("/v1/models"),
        "TokenizeResponse": client.post("/tokenize", json=messages),
        "DetokenizeResponse": client.post("/detokenize", json={"tokens": [71, 72]}),
        "ErrorResponse": client.post("/v1/completions", json={"prompt": [-1]}),
    }
    for name, answer in result.items():
        Draft202012Validator(SCHEMAS[name]).validate(answer.json())


@pytest.mark.parametrize("path", PATHS)
def test_ids_and_log_probabilities_have_equal_lengths(client: httpx2.Client, path: str) -> None:
    answer = client.post(path, json=request_for(path)).json()
    (choice,) = answer["choices"]
    result = choice["logprobs"]
    values = result["token_logprobs"] if "token_logprobs" in result else [one["logprob"] for one in result["content"]]
    assert len(choice["token_ids"]) == len(values) == answer["usage"]["completion_tokens"] > 0
    assert all(value < 0 for value in values)
    seen = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert len(seen) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_stream_pieces_add_up_to_the_whole_answer(client: httpx2.Client, path: str) -> None:
    body = request_for(path)
    whole = client.post(path, json=body).json()["choices"][0]
    pieces = [event["choices"][0] for event in events(client.post(path, json={**body, "stream": True}).text)]
    assert [id_ for piece in pieces for id_ in piece.get("token_ids") or []] == whole["token_ids"]
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    if "text" in whole:
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    if "message" in whole:
        for name in ("content", "reasoning"):
            assert "".join(piece["delta"].get(name) or "" for piece in pieces) == whole["message"][name]
        calls = [{**call} for piece in pieces for call in piece["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == [0, 1]
        assert calls == whole["message"]["tool_calls"]


def test_turn_is_parsed_into_reasoning_content_and_tool_calls(client: httpx2.Client) -> None:
    answer = client.post(PATHS[1], json=request_for(PATHS[1])).json()["choices"][0]
    message = answer["message"]
    assert (message["reasoning"], message["content"]) == ("\nhm\n", "\n\nI look.\n")
    called = [call["function"] for call in message["tool_calls"]]
    assert called == [
        {"name": "bash", "arguments": '{"command": "echo \'ü\'"}'},
        {"name": "bash", "arguments": '{"command": "ls"}'},
    ]
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_tool_call_is_text(client: httpx2.Client, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "broken"}], "tools": TOOLS, "stream": stream}
    answer = client.post(PATHS[1], json=body)
    expected = '<tool_call>\n{"name": "bash", "arguments": {no}\n</tool_call>'
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(answer.text)]
        assert "".join(delta.get("content", "") for delta in deltas) == expected
        assert not any("tool_calls" in delta for delta in deltas)
    else:
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == expected
        assert "tool_calls" not in message


def test_chat_and_ids_give_the_same_tokens(client: httpx2.Client) -> None:
    chat = client.post(PATHS[1], json=request_for(PATHS[1])).json()
    ids = chat["prompt_token_ids"]
    result = {"token_ids": ids, "sampling_params": {"logprobs": 0, "seed": 1}}
    generated = client.post(PATHS[2], json=result).json()["choices"][0]
    completed = client.post(PATHS[0], json={"prompt": ids, "seed": 1, "max_tokens": 500, "logprobs": 0}).json()
    rendered = client.post("/tokenize", json={"messages": [{"role": "user", "content": "two"}], "tools": TOOLS})
    assert generated["token_ids"] == chat["choices"][0]["token_ids"]
    assert completed["choices"][0]["text"].endswith("</tool_call>")
    assert rendered.json()["tokens"] == ids
    values = [one["logprob"] for one in generated["logprobs"]["content"]]
    assert values == [one["logprob"] for one in chat["choices"][0]["logprobs"]["content"]]
    assert values == completed["choices"][0]["logprobs"]["token_logprobs"]


def test_conversation_continues_from_messages(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "two"}]
    result = {"tools": TOOLS, "seed": 1, "return_token_ids": True}
    first = client.post(PATHS[1], json={**result, "messages": messages}).json()
    message = first["choices"][0]["message"]
    message = {**message, "reasoning_content": message["reasoning"]}
    history = [*messages, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ü"}]
    second = client.post(PATHS[1], json={**result, "messages": history}).json()
    assert second["choices"][0]["message"]["content"] == "done"
    ids = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(ids)] == ids


def test_max_tokens(client: httpx2.Client) -> None:
    def lengths(path: str, **more: Any) -> tuple[int, str]:
        choice = client.post(path, json={**request_for(path), **more}).json()["choices"][0]
        return len(choice["token_ids"]), choice["finish_reason"]

    assert lengths(PATHS[0], max_tokens=None, ignore_eos=True) == (16, "length")
    assert lengths(PATHS[0], max_tokens=3) == (3, "length")
    assert lengths(PATHS[1], max_completion_tokens=5) == (5, "length")
    assert lengths(PATHS[2], sampling_params={"max_tokens": 7, "ignore_eos": True}) == (7, "length")
    plain = {"prompt": [5, 9], "return_token_ids": True, "ignore_eos": True}
    assert len(client.post(PATHS[0], json=plain).json()["choices"][0]["token_ids"]) == 16


def test_text_is_streamed_in_whole_characters(recorded: httpx2.Client) -> None:
    for seed in range(10):
        body = {"prompt": [5, 9, 11], "seed": seed, "max_tokens": 200}
        whole = recorded.post(PATHS[0], json=body).json()["choices"][0]["text"]
        stop = next(letter for letter in whole[5:] if letter.isascii())
        for more in ({}, {"stop": stop}):
            text = recorded.post(PATHS[0], json={**body, **more, "stream": True}).text
            pieces = [event["choices"][0]["text"] for event in events(text)]
            assert "".join(pieces) == whole[: whole.index(stop) if more else None]


def test_stop_string_ends_the_text(client: httpx2.Client) -> None:
    def ended(**more: Any) -> tuple[str, Any, list[int]]:
        choice = client.post(PATHS[0], json={**request_for(PATHS[0]), **more}).json()["choices"][0]
        return choice["text"], choice["stop_reason"], choice["token_ids"]

    whole, _, ids = ended()
    assert whole == "I am sorry, I cannot solve this problem, so I give up."
    text, reason, cut = ended(stop=["never", "not"])
    assert (text, reason) == ("I am sorry, I can", "not")
    assert cut == ids[: len(cut)]
    assert client.post("/detokenize", json={"tokens": cut}).json()["prompt"].startswith("I am sorry, I cannot")
    text, reason, cut = ended(stop_token_ids=[ids[4]])
    assert reason == ids[4]
    assert cut == ids[: ids.index(ids[4]) + 1]
    assert whole.startswith(text)


def test_several_prompts_and_samples(client: httpx2.Client) -> None:
    body = {"prompt": [[5, 9], [5, 9, 11]], "n": 2, "return_token_ids": True, "logprobs": 0}
    answer = client.post(PATHS[0], json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in answer["choices"]] == [2, 2, 3, 3]
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("path", PATHS)
def test_request_id_is_that_of_the_client(client: httpx2.Client, path: str) -> None:
    answer = client.post(path, json=request_for(path), headers={"x-request-id": "mine"}).json()
    assert (answer.get("id") or answer["request_id"]).endswith("-mine")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (PATHS[0], {"prompt": []}, 400),
        (PATHS[0], {"prompt": [[1, "a"]]}, 400),
        (PATHS[0], {"prompt": "a", "echo": True}, 400),
        (PATHS[0], {"prompt": "a", "max_tokens": 0}, 400),
        (PATHS[1], {"messages": "hi"}, 400),
        (PATHS[1], {"messages": [{"content": "hi"}]}, 400),
        (PATHS[2], {"token_ids": []}, 400),
        (PATHS[2], {"token_ids": [], "sampling_params": {}}, 400),
        ("/pause?mode=never", {}, 400),
    ],
)
def test_invalid_requests_are_refused(client: httpx2.Client, path: str, body: dict[str, Any], status: int) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status
    Draft202012Validator(SCHEMAS["ErrorResponse"]).validate(answer.json())


def test_body_that_is_not_json_is_refused(client: httpx2.Client) -> None:
    assert client.post(PATHS[0], content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_optional_flags_of_a_server() -> None:
    double = EngineDouble(scale_out=False, control=False, key="secret")
    with serving(double.app()) as url, httpx2.Client(base_url=url) as client:
        assert client.get("/v1/models").json() == {"error": "Unauthorized"}
        assert client.get("/health").status_code == 200
        client.headers["authorization"] = "Bearer secret"
        assert client.get("/v1/models").status_code == 200
        assert client.post(PATHS[2], json=request_for(PATHS[2])).status_code == 403
        assert client.post("/pause").status_code == 404
