"""Malformed answers over real sockets, on every wire: an EngineError, soon, and no part of them is kept."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.contract.engine_promises import until
from tests.services.servers.sockets import Answering, ScriptedAnswer, chunked, head
from workers.policy.engines import open_engine
from workers.policy.engines.connection import watched
from workers.policy.generation import ChatRequest, EngineAddress, Generation

PROMPT = token_ids([1, 2, 3])
N = 4
SPANS = [{"version": "7", "start": 0, "end": 2}]
GENERATE: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "choices": [
        {
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [4, 5],
            "weight_versions": SPANS,
            "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -0.25}]},
        }
    ],
}
COMPLETIONS: dict[str, Any] = {
    "usage": GENERATE["usage"],
    "choices": [
        {
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": [1, 2, 3],
            "token_ids": [4, 5],
            "weight_versions": SPANS,
            "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["token_id:4", "token_id:5"]},
        }
    ],
}
SGLANG: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "output_ids": [4, 5],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 5},
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_versions": SPANS,
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]],
    },
}
CHAT: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "usage": GENERATE["usage"],
    "choices": [
        {
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "token_ids": [4, 5],
            "weight_versions": SPANS,
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        }
    ],
}
CHOICE = ("choices", 0)
WIRES: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    # of each wire: a correct answer, and the place of each field in it
    "generate": (
        GENERATE,
        {
            "ids": (*CHOICE, "token_ids"),
            "logprob": (*CHOICE, "logprobs", "content", 1, "logprob"),
            "finish": (*CHOICE, "finish_reason"),
            "stop": (*CHOICE, "stop_reason"),
            "n": ("usage", "completion_tokens"),
            "cached": ("usage", "prompt_tokens_details", "cached_tokens"),
            "version": (*CHOICE, "weight_versions", 0, "version"),
            "end": (*CHOICE, "weight_versions", 0, "end"),
            "prompt": ("prompt_token_ids",),
            "top": ("choices",),
        },
    ),
    "completions": (
        COMPLETIONS,
        {
            "ids": (*CHOICE, "token_ids"),
            "logprob": (*CHOICE, "logprobs", "token_logprobs", 1),
            "finish": (*CHOICE, "finish_reason"),
            "stop": (*CHOICE, "stop_reason"),
            "n": ("usage", "completion_tokens"),
            "cached": ("usage", "prompt_tokens_details", "cached_tokens"),
            "version": (*CHOICE, "weight_versions", 0, "version"),
            "end": (*CHOICE, "weight_versions", 0, "end"),
            "prompt": (*CHOICE, "prompt_token_ids"),
            "top": ("choices",),
        },
    ),
    "sglang": (
        SGLANG,
        {
            "ids": ("output_ids",),
            "logprob": ("meta_info", "output_token_logprobs", 1, 0),
            "finish": ("meta_info", "finish_reason", "type"),
            "stop": ("meta_info", "finish_reason", "matched"),
            "n": ("meta_info", "completion_tokens"),
            "cached": ("meta_info", "cached_tokens"),
            "version": ("meta_info", "weight_versions", 0, "version"),
            "end": ("meta_info", "weight_versions", 0, "end"),
            "prompt": ("prompt_token_ids",),
            "top": ("meta_info",),
        },
    ),
    "chat": (
        CHAT,
        {
            "ids": (*CHOICE, "token_ids"),
            "logprob": (*CHOICE, "logprobs", "content", 1, "logprob"),
            "finish": (*CHOICE, "finish_reason"),
            "stop": (*CHOICE, "stop_reason"),
            "n": ("usage", "completion_tokens"),
            "cached": ("usage", "prompt_tokens_details", "cached_tokens"),
            "version": (*CHOICE, "weight_versions", 0, "version"),
            "end": (*CHOICE, "weight_versions", 0, "end"),
            "prompt": ("prompt_token_ids",),
            "top": ("choices",),
        },
    ),
}
MISSING = object()
_LOGPROBS: list[Any] = [None, 0.5, -9999.0, False, "-0.25", [-0.25], {}, MISSING]
_MORE_IDS: list[Any] = [[4, None], [4, [5]], "45", {"4": 5}, 45, [4], [4, 5, 6], [4, 5, 6, 7, 8], []]
_PROMPTS: list[Any] = [True, [1, 2, -3], [1, 2, 2**22], [1, 2, 3.5], "123", {"a": 1}]
_TOPS: list[Any] = [None, [], {}, "x", 1, MISSING]
_IDS: list[Any] = [[4, -5], [4, 2**22], [4, 2**31], [4, 2**70], [4, 5.5], [4, True], [4, "5"]]
_FINISHES: list[Any] = [None, "", "banana", "error", ["stop"], True, 1, MISSING]
_STOPS: list[Any] = [[5], True, 2**70, 1.5, {}]
_COUNTS: list[Any] = [None, 0, 3, -2, 2.0, True, "2", 2**70]
_CACHED: list[Any] = [-1, 2**70, "1", True, 1.0, 9]
_VERSIONS: list[Any] = ["-7", -7, True, 7.5, "9" * 100_000, ["7"], "7\n"]
_ENDS: list[Any] = [1, 3, -2, 2.0, True, "2", 2**70]
_BY_PLACE: dict[str, list[Any]] = {
    "ids": _IDS + _MORE_IDS,
    "logprob": _LOGPROBS,
    "finish": _FINISHES,
    "stop": _STOPS,
    "n": _COUNTS,
    "cached": _CACHED,
    "version": _VERSIONS,
    "end": _ENDS,
    "prompt": _PROMPTS,
    "top": _TOPS,
}
BROKEN = [(name, value) for name, values in _BY_PLACE.items() for value in values]


def changed(answer: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(answer)
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made


def opened(url: str, wire: str, timeout_s: float = 20.0) -> Any:
    token_in = "" if wire == "chat" else wire
    kind = "sglang" if wire == "sglang" else "vllm"
    info = EngineInfo(kind=kind, model="m", token_in=token_in, token_out=True)
    return open_engine(EngineAddress(f"{url}/v1", "m"), info, timeout_s=timeout_s)


async def call_engine(engine: Any, wire: str, stream: bool = False) -> Any:
    if wire == "chat":
        return await engine.chat(ChatRequest([{"role": "user", "content": "hi"}], N, SamplingParams()))
    on_ids = (lambda _: None) if stream else None
    return await engine.generate(PROMPT, SamplingParams(), N, on_ids=on_ids, n_vocabulary=1000)


def trying(
    check: Callable[[Any], Awaitable[None]], wire: str, *answers: ScriptedAnswer, timeout_s: float = 20.0
) -> None:
    """Check an engine that returns these answers, one per request."""

    async def run() -> None:
        async with Answering(*answers) as server, asyncio.timeout(40):
            engine = opened(server.url, wire, timeout_s)
            try:
                await check(engine)
            finally:
                await engine.aclose()

    asyncio.run(run())


def whole(answer: Any) -> bytes:
    data = orjson.dumps(answer)
    return head("application/json", len(data)) + data


@pytest.mark.parametrize("wire", WIRES)
def test_broken_answers_are_refused_on_every_wire(wire: str) -> None:
    answer, places = WIRES[wire]
    # in a complete chat answer it may be null
    taken = ("chat", "finish", None)
    broken = [
        (name, value, changed(answer, places[name], value)) for name, value in BROKEN if (wire, name, value) != taken
    ]

    async def check(engine: Any) -> None:
        right = await call_engine(engine, wire)
        assert right.response_ids.tolist() == [4, 5]
        for name, value, _ in broken:
            failure = (await asyncio.gather(call_engine(engine, wire), return_exceptions=True))[0]
            assert isinstance(failure, EngineError), (name, str(value)[:40])
            assert failure.retryable, (name, str(value)[:40])

    def written(value: Any) -> bytes:
        data = json.dumps(value).encode()
        return head("application/json", len(data)) + data

    trying(check, wire, whole(answer), *[written(made) for _, _, made in broken])


@pytest.mark.parametrize("wire", ["generate", "completions", "sglang"])
def test_stream_is_checked_before_any_of_it_is_passed_on(wire: str) -> None:
    answer, places = WIRES[wire]
    wrong = [[4, 1000], [4, -1], [4, True], [4, 5, 6, 7, 8]]
    seen: list[Any] = []

    async def check(engine: Any) -> None:
        for ids in wrong:
            with pytest.raises(EngineError, match="does not add up"):
                await engine.generate(PROMPT, SamplingParams(), N, on_ids=seen.append, n_vocabulary=1000)
            assert not seen, ids

    def streamed(ids: list[Any]) -> bytes:
        made = changed(answer, places["ids"], ids)
        if wire == "sglang":
            made = changed(made, places["n"], len(ids))
        data = b"data: " + orjson.dumps(made) + b"\n\ndata: [DONE]\n\n"
        return head("text/event-stream", len(data)) + data

    trying(check, wire, *map(streamed, wrong))


async def endless(writer: asyncio.StreamWriter, part: bytes, pause_s: float = 0.0) -> None:
    while True:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause_s)


def forever(begin: bytes, part: bytes, pause_s: float = 0.0) -> ScriptedAnswer:
    async def scripted(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        await endless(writer, part, pause_s)

    return scripted


async def bomb(writer: asyncio.StreamWriter) -> None:
    packed = gzip.compress(b" " * 50_000_000, 1)
    writer.write(head("application/json", len(packed), "content-encoding: gzip") + packed)
    await writer.drain()


OF_NO_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
EVENTS = OF_NO_LENGTH.replace(b"application/json", b"text/event-stream")
SWAMPS: dict[str, tuple[ScriptedAnswer, str]] = {
    "a large body without an end": (forever(OF_NO_LENGTH, b" " * 65536), "more than"),
    "a large body that is announced": (head("application/json", 2**30) + b" " * 4_000_000, "more than"),
    "chunks without an end": (forever(head("application/json", None), chunked(b" " * 65536)), "more than"),
    "one number without an end": (forever(OF_NO_LENGTH + b'{"usage":1', b"1" * 65536), "more than"),
    "one event without an end": (forever(EVENTS + b"data: ", b"x" * 65536), "more than"),
    "an error without an end": (forever(OF_NO_LENGTH.replace(b"200 OK", b"500 X"), b" " * 65536), "more than"),
    "headers without an end": (forever(b"HTTP/1.1 200 OK\r\n", b"x: " + b"y" * 1000 + b"\r\n"), "broke off"),
    "one header without an end": (forever(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536), "broke off"),
    "a gzip bomb": (bomb, "compresses"),
    "another packing": (head("application/json", 2, "content-encoding: zstd") + b"{}", "compresses"),
}


@pytest.mark.parametrize("name", SWAMPS)
@pytest.mark.parametrize(("wire", "stream"), [("generate", False), ("generate", True), ("chat", False)])
def test_answer_without_an_end_is_refused(name: str, wire: str, stream: bool) -> None:
    scripted, reason = SWAMPS[name]

    async def check(engine: Any) -> None:
        with pytest.raises(EngineError, match=reason):
            await call_engine(engine, wire, stream)

    trying(check, wire, scripted)


DRIPS: dict[str, ScriptedAnswer] = {
    "events without tokens": forever(EVENTS, b'data: {"choices": []}\n\n', 0.02),
    "comments": forever(EVENTS, b": I live\n\n", 0.02),
    "bytes of one event": forever(EVENTS + b"data: ", b" ", 0.02),
    "nothing": forever(EVENTS, b"", 0.02),
    "empty chunks of a choice": forever(EVENTS, b'data: {"choices": [{"token_ids": []}]}\n\n', 0.02),
}


@pytest.mark.parametrize("name", DRIPS)
def test_stream_without_tokens_ends(name: str) -> None:
    async def check(engine: Any) -> None:
        with pytest.raises(EngineError, match="did not answer in time"):
            await call_engine(engine, "generate", True)

    trying(check, "generate", DRIPS[name], timeout_s=0.5)


def test_call_whose_answer_trickles_is_reported_as_stalled() -> None:
    async def check(engine: Any) -> None:
        with watched() as progress:
            call = asyncio.ensure_future(call_engine(engine, "generate"))
            await until(lambda: progress.body_since is not None)
            assert progress.stalled == ""
            # as if it had continued for a minute
            progress.body_since = time.monotonic() - 60.0
            assert "sending one answer" in progress.stalled
            call.cancel()

    trying(check, "generate", forever(OF_NO_LENGTH, b" ", 0.02))


@pytest.mark.parametrize("wire", ["generate", "completions", "sglang"])
def test_no_tokens_before_an_abort_are_no_fault(wire: str) -> None:
    answer, places = WIRES[wire]
    for name, value in {"ids": [], "finish": "abort", "n": 0, "stop": None}.items():
        answer = changed(answer, places[name], value)
    for path in (places["version"][:-2], places["logprob"][:-2] if wire != "completions" else places["logprob"][:-1]):
        answer = changed(answer, path, [])
    if wire == "completions":
        answer = changed(answer, (*CHOICE, "logprobs", "tokens"), [])

    async def check(engine: Any) -> None:
        generation: Generation = await call_engine(engine, wire)
        assert (generation.finish_reason, len(generation.response_ids)) == ("abort", 0)

    trying(check, wire, whole(answer))
