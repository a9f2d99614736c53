"""Promises of every engine kind: those of the farm, and the example, installed as a plug-in."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.contract import engine_promises
from tests.contract.engine_promises import TOKEN_PROMISES, Promise, check_promise
from tests.doubles import EngineDouble
from tests.services.entry_points import install, installed
from tests.services.preloaded import completed
from tests.services.servers.llamacpp_server import LlamaCppServer
from workers.policy.engines import detect, open_engine
from workers.policy.engines.connection import EngineConnection
from workers.policy.engines.kind import kind, kinds, wire_of
from workers.policy.generation import ChatRequest, Engine, EngineAddress, EngineRefused, EngineUnfit
from workers.testing.engine.model_text import make_tokenizer
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine_kind"
MODEL = "m"
"""Given explicitly, as one of the servers lists none."""
SERVERS: dict[str, Callable[[], Starlette]] = {
    "vllm": lambda: EngineDouble(model=MODEL, context_tokens=2048).app(),
    "sglang": lambda: EngineDouble(wire="sglang", model=MODEL, context_tokens=2048).app(),
    "openai": lambda: EngineDouble(wire="openai", model=MODEL).app(),
    "prorl": lambda: EngineDouble(wire="prorl", model=MODEL, context_tokens=2048).app(),
    "llamacpp": lambda: LlamaCppServer(make_tokenizer()).app(),
}


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(EXAMPLE, tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, example: None) -> Iterator[tuple[str, str]]:
    """Yield the name of a kind, and the URL of a server of it."""
    with serving(SERVERS[request.param]()) as url:
        yield request.param, f"{url}/v1"


def with_engine(url: str, use: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        address = EngineAddress(url, model=MODEL)
        engine = open_engine(address, await detect(address), timeout_s=30.0)
        try:
            return await use(engine)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def detected(url: str) -> EngineInfo:
    return asyncio.run(detect(EngineAddress(url, model=MODEL)))


def test_server_is_detected_only_by_its_kind(server: tuple[str, str]) -> None:
    name, url = server
    assert detected(url).kind == name

    async def claims() -> dict[str, bool]:
        connection = EngineConnection(url, "none", 10.0)
        try:
            listed = await connection.get_object("/v1/models")
            card = listed["data"][0] if listed else {}
            return {each: await known.identify(connection, card) is not None for each, known in kinds()}
        finally:
            await connection.aclose()

    assert asyncio.run(claims()) == {each: each in (name, "openai") for each in ("bridge", *SERVERS)}


def test_fallback_kinds_come_last() -> None:
    assert [each.is_fallback for _, each in kinds()] == [False, False, False, False, False, True]


def test_wires_have_unique_names_and_routes(server: tuple[str, str]) -> None:
    name, url = server
    info = detected(url)
    wires = kind(name).wires(info)
    assert len({wire.name for wire in wires}) == len({wire.path for wire in wires}) == len(wires) > 0
    assert all(wire.path.startswith("/") and wire.advice for wire in wires)
    wire = wire_of(info)
    assert (wire is None) == (name == "openai")
    assert wire is None or wire.name == info.token_in


def test_engine_is_healthy_and_chats_where_supported(server: tuple[str, str]) -> None:
    assert with_engine(server[1], lambda engine: engine.healthy()) is True
    messages = [{"role": "user", "content": "Hello"}]
    chat = ChatRequest(messages, 8, SamplingParams())
    if server[0] == "prorl":
        with pytest.raises(EngineError):
            with_engine(server[1], lambda engine: engine.chat(chat))
        return
    completion = with_engine(server[1], lambda engine: engine.chat(chat))
    assert completion.response["role"] == "assistant"


def test_engine_is_controlled_or_refuses_orders(server: tuple[str, str]) -> None:
    async def check(engine: Engine) -> None:
        if engine.info.control:
            await engine.set_version("7")
            assert await engine.version() == "7"
            await engine.pause("keep")
            assert await engine.paused() in (True, None)
            await engine.resume()
            assert await engine.paused() in (False, None)
            return
        for order in (engine.pause("keep"), engine.resume(), engine.set_version("1"), engine.load_weights("/w")):
            with pytest.raises(EngineError, match="the farm holds calls back"):
                await order
        assert (await engine.version(), await engine.paused()) == ("", None)

    with_engine(server[1], check)


@pytest.fixture(scope="module")
def llamacpp(example: None) -> Iterator[str]:
    with serving(LlamaCppServer(make_tokenizer()).app()) as url:
        yield url


@pytest.mark.parametrize("check", TOKEN_PROMISES, ids=lambda check: check.__name__)
def test_promise_of_the_example(check: Promise, llamacpp: str) -> None:
    check_promise(llamacpp, check, make_tokenizer(), spans=False)


def test_example_is_detected(llamacpp: str) -> None:
    info = detected(f"{llamacpp}/v1")
    assert (info.version, info.token_in, info.token_out, info.logprobs) == ("b6000-0123abc", "completion", True, "raw")
    assert (info.context_tokens, info.control) == (2048, False)


def test_example_samples_the_unmodified_distribution(llamacpp: str) -> None:
    server = LlamaCppServer(make_tokenizer())
    with serving(server.app()) as url:
        sampling = SamplingParams(top_p=0.9, seed=2**40 + 3)
        with_engine(f"{url}/v1", lambda engine: engine.generate(token_ids([5, 6]), sampling, 3))
    sent = {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.0, "seed": 3}
    assert sent.items() <= server.requests[-1].items()


@pytest.mark.parametrize("name", ["min_tokens", "stop_token_ids", "cache_salt"])
def test_unsupported_parameter_is_refused_by_name(llamacpp: str, name: str) -> None:
    value = {"min_tokens": 2, "stop_token_ids": (3,), "cache_salt": "7"}[name]
    sampling = SamplingParams.model_validate({name: value})
    with pytest.raises(EngineRefused, match=f"lacks {name}: leave it out"):
        with_engine(f"{llamacpp}/v1", lambda engine: engine.generate(token_ids([5, 6]), sampling, 8))


def test_omitted_token_is_detected() -> None:
    server = LlamaCppServer(make_tokenizer(), torn_at=2)
    with serving(server.app()) as url, pytest.raises(EngineError, match="does not add up"):
        with_engine(f"{url}/v1", lambda engine: engine.generate(token_ids([5, 6]), SamplingParams(seed=1), 8))


@pytest.mark.parametrize("ends_at", [0, 2])
def test_stream_without_its_last_event_is_an_error(ends_at: int) -> None:
    server = LlamaCppServer(make_tokenizer(), ends_at=ends_at)

    async def ask(engine: Engine) -> None:
        await engine.generate(token_ids([5, 6]), SamplingParams(seed=1), 8)

    info = EngineInfo(kind="llamacpp", model="m", token_in="completion", token_out=True)
    with serving(server.app()) as url, pytest.raises(EngineError, match="no finish reason"):
        asyncio.run(ask(open_engine(EngineAddress(f"{url}/v1"), info)))


_OF_PRORL = (
    engine_promises.every_id_has_a_log_probability,
    engine_promises.versions_cover_the_response,
    engine_promises.same_seed_gives_the_same_ids,
    engine_promises.max_tokens_ends_the_generation,
)


@pytest.mark.parametrize("check", _OF_PRORL, ids=lambda check: check.__name__)
def test_promise_of_the_prorl_server(check: Promise) -> None:
    with serving(SERVERS["prorl"]()) as url:
        with_engine(f"{url}/v1", lambda engine: check(engine_promises.Bench(engine, make_tokenizer(), spans=False)))


def test_full_prorl_response_ends_by_length() -> None:
    with serving(SERVERS["prorl"]()) as url:
        info = detected(f"{url}/v1")
        assert (info.token_in, info.token_out, info.logprobs) == ("prompt_ids", True, "processed")
        many = with_engine(f"{url}/v1", lambda engine: engine.generate(token_ids([5, 6]), SamplingParams(seed=1), 2000))
    assert many.finish_reason == ("length" if len(many.response_ids) == 2000 else "stop")


@pytest.mark.parametrize(
    "answer",
    [
        {"response_ids": [1, 2], "logprobs": [-1.0]},
        {"response_ids": [1], "logprobs": None},
        {"response_ids": [], "logprobs": []},
        {"response_ids": [1], "logprobs": [0.5]},
        {"logprobs": [-1.0]},
    ],
)
def test_inconsistent_prorl_response_is_an_error(answer: dict[str, Any]) -> None:
    app = Starlette(routes=[Route("/generate", lambda _: JSONResponse(answer), methods=["POST"])])
    info = EngineInfo(kind="prorl", model="m", token_in="prompt_ids", token_out=True)

    async def ask(url: str) -> None:
        engine = open_engine(EngineAddress(f"{url}/v1"), info)
        try:
            await engine.generate(token_ids([5, 6]), SamplingParams(), 8)
        finally:
            await engine.aclose()

    with serving(app) as url, pytest.raises(EngineError):
        asyncio.run(ask(url))


def test_missing_kind_is_named() -> None:
    with pytest.raises(EngineUnfit, match=r"no farm.engines plug-in 'missing'; installed: bridge, llamacpp"):
        open_engine(EngineAddress("http://e/v1"), EngineInfo(kind="missing", token_in="x"))


def test_broken_kind_does_not_affect_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "broken"\nversion = "1"\n[project.entry-points."farm.engines"]\n'
        'absent = "no_such_module:Kind"\nbroken = "broken_kind:Kind"\n'
    )
    (project / "broken_kind.py").write_text(
        "from workers.policy.engines.kind import EngineKind\n\n\nclass Kind(EngineKind):\n"
        "    async def identify(self, connection, card):\n        raise KeyError('of its own')\n"
    )
    with installed(project, tmp_path / "site"), serving(SERVERS["vllm"]()) as url:
        assert detected(f"{url}/v1").kind == "vllm"
        with pytest.raises(EngineUnfit, match="'absent' cannot be imported here"):
            open_engine(EngineAddress(f"{url}/v1"), EngineInfo(kind="absent"))
    assert "'absent' cannot be used" in caplog.text
    assert "engine kind broken failed" in caplog.text


def test_doctor_process_detects_the_installed_example(llamacpp: str, tmp_path: Path) -> None:
    install(EXAMPLE, tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    done = completed("workers.cli.engine_check", [f"{llamacpp}/v1", "--json"], env)
    info = json.loads(done.stdout)["info"]
    assert (info["kind"], info["token_in"]) == ("llamacpp", "completion"), done.stderr
