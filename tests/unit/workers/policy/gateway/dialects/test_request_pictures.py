"""Images in requests of the four APIs: in user messages and in results of tools; elsewhere they are refused by name."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.drawn_images import base64_of, png, url_of
from workers.policy.gateway.dialects import request_pictures
from workers.policy.gateway.dialects.anthropic_messages import MessagesApi
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.google_contents import GoogleApi
from workers.policy.gateway.dialects.model_api import Api, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.request_pictures import RequestPictures
from workers.policy.gateway.dialects.responses import ResponsesApi
from workers.policy.message_images import PicturePart, digests_of, parts_of

RED, BLUE = png(), png(colour=(0, 0, 255))
TEXT = {"type": "text", "text": "look"}


def read(api: Api, body: dict[str, Any], pictures: RequestPictures | None = None) -> ParsedRequest:
    return api.parse((pictures or RequestPictures()).put_into(body))


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    called = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    if role == "tool":
        return {"messages": [*called, {"role": "tool", "tool_call_id": "1", "content": list(parts)}]}
    return {"messages": [{"role": role, "content": list(parts)}]}


def responses(*parts: Any, role: str = "user") -> dict[str, Any]:
    if role == "tool":
        call = {"type": "function_call", "call_id": "1", "name": "view", "arguments": "{}"}
        return {
            "input": [
                {"role": "user", "content": "go"},
                call,
                {"type": "function_call_output", "call_id": "1", "output": list(parts)},
            ]
        }
    return {"input": [{"type": "message", "role": role, "content": list(parts)}]}


def messages(*parts: Any, role: str = "user") -> dict[str, Any]:
    if role == "tool":
        used = {"type": "tool_use", "id": "1", "name": "view", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": list(parts)}
        go = {"role": "user", "content": "go"}
        return {"messages": [go, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]}
    if role == "system":
        return {"system": list(parts), "messages": [{"role": "user", "content": "go"}]}
    return {"messages": [{"role": role, "content": list(parts)}]}


def contents(*parts: Any, role: str = "user") -> dict[str, Any]:
    if role == "tool":
        texts = [part["text"] for part in parts if "text" in part]
        images = [part for part in parts if "text" not in part]
        call = {"functionCall": {"id": "1", "name": "view", "args": {}}}
        result = {"id": "1", "name": "view", "response": {"output": texts[0]}, "parts": images}
        go = {"role": "user", "parts": [{"text": "go"}]}
        return {
            "contents": [
                go,
                {"role": "model", "parts": [call]},
                {"role": "user", "parts": [{"functionResponse": result}]},
            ]
        }
    if role == "system":
        return {"systemInstruction": {"parts": list(parts)}, "contents": "go"}
    return {"contents": [{"role": "model" if role == "assistant" else role, "parts": list(parts)}]}


def in_chat(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), "detail": "low"}}


def in_responses(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(data), "detail": "auto"}


def in_messages(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(data)}}


def in_contents(data: bytes) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": base64_of(data)}}


Body = Callable[..., dict[str, Any]]
DIALECTS = [
    pytest.param(ChatApi, chat, in_chat, TEXT, id="chat"),
    pytest.param(ResponsesApi, responses, in_responses, {"type": "input_text", "text": "look"}, id="responses"),
    pytest.param(MessagesApi, messages, in_messages, TEXT, id="messages"),
    pytest.param(GoogleApi, contents, in_contents, {"text": "look"}, id="google"),
]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(("api", "body", "image", "text"), DIALECTS)
def test_image_of_a_user_or_a_tool_is_read(
    api: Callable[[], Api], body: Body, image: Callable[[bytes], Any], text: Any, role: str
) -> None:
    parsed = read(api(), body(text, image(RED), image(BLUE), role=role))
    message = parsed.messages[-1]
    assert message["role"] == role
    shown, *images = message["content"]
    assert shown == TEXT
    assert all(type(each) is PicturePart for each in images)
    assert [each.picture.data for each in images] == [RED, BLUE]
    assert message.get("tool_call_id") == ("1" if role == "tool" else None)


@pytest.mark.parametrize("role", ["system", "assistant"])
@pytest.mark.parametrize(("api", "body", "image", "text"), DIALECTS)
def test_image_elsewhere_is_refused_by_name(
    api: Callable[[], Api], body: Body, image: Callable[[bytes], Any], text: Any, role: str
) -> None:
    with pytest.raises(BadRequest, match=r"image.*(supported only in user messages|not taken from an assistant)"):
        read(api(), body(text, image(RED), role=role))


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(("api", "body", "image", "text"), DIALECTS)
def test_images_are_refused_unless_the_batch_enables_them(
    api: Callable[[], Api], body: Body, image: Callable[[bytes], Any], text: Any, role: str
) -> None:
    with pytest.raises(BadRequest):
        api().parse(body(text, image(RED), role=role))
    forged = {"type": "image", "sha256": "0" * 64, "media_type": "image/png", "n_bytes": 1}
    with pytest.raises(BadRequest):
        api().parse(body(text, forged, role=role))
    with pytest.raises(BadRequest):
        read(api(), body(text, forged, role=role))


ADDRESS = "https://example.org/a.png"


@pytest.mark.parametrize(
    ("api", "body", "reason"),
    [
        (ChatApi, chat({"type": "image_url", "image_url": {"url": ADDRESS}}), r"messages\[0\].content\[0\].*data: URL"),
        (ChatApi, chat({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}), "data: URL"),
        (ChatApi, chat({"type": "image_url"}), "must be given as base64"),
        (
            ChatApi,
            chat({"type": "image_url", "image_url": {"url": url_of(b"%PDF-1.7")}}),
            "must be PNG, JPEG, WebP or GIF",
        ),
        (ChatApi, chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}), "base64 is invalid"),
        (ChatApi, chat({"type": "input_audio", "input_audio": {}}), "'input_audio' is not supported"),
        (ChatApi, chat({"type": "file", "file": {"file_data": url_of(RED)}}), "'file' is not supported"),
        (ResponsesApi, responses({"type": "input_image", "image_url": ADDRESS}), "data: URL"),
        (ResponsesApi, responses({"type": "input_image", "file_id": "file-1"}), "must be given as base64"),
        (MessagesApi, messages({"type": "image", "source": {"type": "url", "url": ADDRESS}}), "data: URL"),
        (MessagesApi, messages({"type": "image", "source": {"type": "file", "file_id": "1"}}), "must have base64"),
        (MessagesApi, messages({"type": "image"}, role="tool"), r"content\[0\].content\[0\].source.*base64"),
        (MessagesApi, messages({"type": "document", "source": {"type": "base64"}}), "'document' is not supported"),
        (GoogleApi, contents({"fileData": {"fileUri": ADDRESS, "mimeType": "image/png"}}), "data: URL"),
        (GoogleApi, contents({"inlineData": {"mimeType": "audio/wav", "data": ""}}), "inlineData"),
        (GoogleApi, contents({"inlineData": {"mimeType": "image/png", "data": 3}}), "must be given as base64"),
    ],
)
def test_invalid_image_is_refused_by_name(api: Callable[[], Api], body: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        read(api(), body)


def test_names_in_snake_case_and_the_url_safe_alphabet_are_read() -> None:
    data = RED + bytes(range(200, 256)) * 3
    text = base64.urlsafe_b64encode(data).decode().rstrip("=")
    assert set("-_") & set(text)
    body = {"contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": text}}]}]}
    (part,) = parts_of(read(GoogleApi(), body).messages)
    assert part.picture.data == data


def test_image_that_is_sent_again_is_stored_once() -> None:
    pictures = RequestPictures()
    first = read(ChatApi(), chat(in_chat(RED)), pictures)
    second = read(MessagesApi(), messages(in_messages(RED), in_messages(RED)), pictures)
    (one,), (two, three) = parts_of(first.messages), parts_of(second.messages)
    assert one.picture is two.picture is three.picture
    assert digests_of(second.messages) == (one.picture.sha256,) * 2


def test_sizes_and_numbers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_pictures, "MAX_IMAGES", 2)
    with pytest.raises(BadRequest, match="a request may have at most 2 images"):
        read(ChatApi(), chat(*[in_chat(RED)] * 3))
    monkeypatch.setattr(request_pictures, "MAX_HELD_BYTES", len(RED) + len(BLUE) - 1)
    pictures = RequestPictures()
    read(ChatApi(), chat(in_chat(RED)), pictures)
    read(ChatApi(), chat(in_chat(RED)), pictures)
    with pytest.raises(BadRequest, match="images of the rollout have"):
        read(ChatApi(), chat(in_chat(BLUE)), pictures)
    monkeypatch.setattr(request_pictures, "MAX_IMAGE_BYTES", len(RED) - 1)
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\].*bytes"):
        read(ChatApi(), chat(in_chat(RED)))


def test_arguments_of_a_call_are_not_images() -> None:
    used = {"type": "tool_use", "id": "1", "name": "find", "input": {"content": [{"type": "image"}]}}
    body = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": [used]}]}
    (call,) = read(MessagesApi(), body).messages[-1]["tool_calls"]
    assert call["function"]["arguments"] == '{"content":[{"type":"image"}]}'


def test_response_that_follows_another_has_its_images() -> None:
    from workers.testing import answering

    api, pictures = ResponsesApi(), RequestPictures()
    asked = read(api, responses(in_responses(RED)), pictures)
    first = api.answer(asked, answering("red"))
    body = {"input": "sure?", "previous_response_id": first["id"]}
    assert digests_of(read(api, body, pictures).messages) == digests_of(asked.messages)
