"""Images in messages: a digest represents each, and an engine is sent all of them or no message."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.records.trajectory import Message
from tests.doubles.drawn_images import png, url_of
from workers.policy.engines.chat_route import named
from workers.policy.gateway.calls import one_leading
from workers.policy.generation import EngineRefused
from workers.policy.message_images import Picture, PicturePart, as_sent, digests_of, joined, media_in

RED, BLUE = png(), png(colour=(0, 0, 255))
DATA = {"red": RED, "blue": BLUE}


def part(data: bytes = RED) -> PicturePart:
    picture = Picture.of(data)
    assert picture is not None
    return PicturePart(picture)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (RED, "image/png"),
        (b"\xff\xd8\xff\xe0rest", "image/jpeg"),
        (b"GIF89a rest", "image/gif"),
        (b"GIF87a rest", "image/gif"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
    ],
)
def test_image_type_is_detected_from_its_first_bytes(data: bytes, media_type: str) -> None:
    picture = Picture.of(data)
    assert picture is not None
    assert (picture.media_type, picture.sha256) == (media_type, hashlib.sha256(data).hexdigest())
    assert picture.artefact.name == f"{picture.sha256}.{media_type[6:]}"
    assert picture.artefact.data == data


@pytest.mark.parametrize("data", [b"", b"%PDF-1.7", b"RIFF\x10\0\0\0WAVE", b"<svg/>", b"\x89PNG"])
def test_other_bytes_are_not_an_image(data: bytes) -> None:
    assert Picture.of(data) is None


def test_part_is_recorded_without_the_image_and_copied_with_it() -> None:
    red = part()
    digest = hashlib.sha256(RED).hexdigest()
    written = {"type": "image", "sha256": digest, "media_type": "image/png", "n_bytes": len(RED)}
    assert json.loads(json.dumps(red)) == orjson.loads(orjson.dumps(red)) == written
    for copied in (copy.deepcopy([red])[0], copy.copy(red), pickle.loads(pickle.dumps(red))):
        assert copied == red
        assert copied.picture.data == RED


def test_engine_is_sent_the_image_in_its_place() -> None:
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, part()]},
        {"role": "tool", "tool_call_id": "1", "content": [part(BLUE)]},
        {"role": "user", "content": "so?"},
    ]
    sent = as_sent(messages)
    assert sent[0]["content"][1] == {"type": "image_url", "image_url": {"url": url_of(RED)}}
    assert sent[1] == {
        "role": "tool",
        "tool_call_id": "1",
        "content": [{"type": "image_url", "image_url": {"url": url_of(BLUE)}}],
    }
    assert sent[2] is messages[2]
    assert isinstance(messages[0]["content"][1], PicturePart)


def test_lost_image_is_refused() -> None:
    messages: list[Message] = [{"role": "user", "content": [dict(part())]}]
    with pytest.raises(EngineRefused, match="has no bytes: pass the parts"):
        as_sent(messages)
    assert media_in(messages) == "image"


def test_joined_contents_keep_images_in_their_places() -> None:
    red = part()
    assert joined(["a", "b"], "\n") == "a\nb"
    assert joined(["a", [red], "b", "c"], "\n") == [
        {"type": "text", "text": "a"},
        red,
        {"type": "text", "text": "b\nc"},
    ]
    assert joined([[red], [red]], "\n") == [red, red]


_PARTS = st.lists(st.sampled_from(["text", "red", "blue"]), max_size=4)
_MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), _PARTS), min_size=1, max_size=6
)


def _content(kinds: list[str]) -> Any:
    return joined(["x" if kind == "text" else [part(DATA[kind])] for kind in kinds], "\n")


@given(_MESSAGES)
def test_no_image_is_dropped_on_the_way_to_an_engine(drawn: list[tuple[str, list[str]]]) -> None:
    messages: list[Message] = [
        {"role": role, "content": "x" if role in ("system", "assistant") else _content(kinds)} for role, kinds in drawn
    ]
    wanted = [kind for role, kinds in drawn if role in ("user", "tool") for kind in kinds if kind != "text"]
    read = one_leading(messages)
    assert digests_of(read) == tuple(hashlib.sha256(DATA[kind]).hexdigest() for kind in wanted)
    urls = [
        each["image_url"]["url"]
        for message in as_sent(named(read))
        if isinstance(message["content"], list)
        for each in message["content"]
        if each["type"] == "image_url"
    ]
    assert urls == [url_of(DATA[kind]) for kind in wanted]
