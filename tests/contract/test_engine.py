"""Promises of every engine client, on the scripted engine as each server it emulates; a real one: tests/vllm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from farm.errors import EngineError
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.contract.engine_promises import PROMISES, Promise, check_promise, until
from tests.doubles import EngineDouble, Wire
from workers.policy.engines import detect, open_engine
from workers.policy.generation import EngineAddress, EngineBusy, Generation
from workers.testing.engine.model_text import make_tokenizer
from workers.testing.serving import serving

PROMPT = token_ids([5, 6, 7, 300, 301])
SERVERS: dict[str, dict[str, Any]] = {
    "vllm-0.33": {},
    "vllm-0.32": {"version": "0.32.0"},
    "vllm-0.33-completions": {"scale_out": False},
    "vllm-0.32-completions": {"version": "0.32.0", "scale_out": False},
    "sglang": {"wire": "sglang"},
}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield the name and the URL of a double that emulates this server."""
    double = EngineDouble(**SERVERS[request.param], context_tokens=2048, mean_tokens=600, tokens_per_s=2000.0, seed=3)
    with serving(double.app()) as url:
        yield request.param, url


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_promise(check: Promise, server: tuple[str, str]) -> None:
    name, url = server
    check_promise(url, check, make_tokenizer(), spans=name != "vllm-0.32-completions")


Faulty = tuple[EngineDouble, str]


@pytest.fixture(scope="module", params=["generate", "completions", "sglang"])
def faulty(request: pytest.FixtureRequest) -> Iterator[Faulty]:
    """Yield a double and its URL, for each wire format."""
    wire: Wire = "sglang" if request.param == "sglang" else "vllm"
    double = EngineDouble(wire=wire, scale_out=request.param == "generate", retry_after_s=7.0, mean_tokens=30)
    with serving(double.app()) as url:
        yield double, url


def with_warm_engine(
    faulty: Faulty, check: Callable[[EngineDouble, Callable[..., Awaitable[Generation]]], Awaitable[None]]
) -> None:
    """Run a check with an engine that has made a call already, so that it has an idle connection."""
    double, url = faulty

    async def run() -> None:
        address = EngineAddress(f"{url}/v1")
        engine = open_engine(address, await detect(address), timeout_s=30.0)

        async def ask(stream: bool) -> Generation:
            on_ids = (lambda _: None) if stream else None
            return await engine.generate(PROMPT, SamplingParams(seed=4), 30, on_ids=on_ids)

        try:
            await ask(False)
            async with asyncio.timeout(120):
                await check(double, ask)
        finally:
            await engine.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "answered 500"),
        ("502", "answered 502"),
        ("reset", "broke off"),
        ("lengths", "does not add up"),
        ("garbage", "does not add up"),
    ],
)
def test_fault_is_an_engine_error_of_one_call(faulty: Faulty, fault: str, reason: str, stream: bool) -> None:
    async def check(double: EngineDouble, ask: Callable[..., Awaitable[Generation]]) -> None:
        double.fail_next(fault)
        with pytest.raises(EngineError, match=rf"engine http://127.0.0.1:\d+/v1 .*{reason}") as failure:
            await ask(stream)
        assert type(failure.value) is not EngineBusy
        assert failure.value.retryable
        assert len((await ask(stream)).response_ids) > 0

    with_warm_engine(faulty, check)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fault", "wait_s"), [("429", 7.0), ("503", None)])
def test_busy_engine_reports_its_retry_delay(faulty: Faulty, fault: str, wait_s: float | None, stream: bool) -> None:
    async def check(double: EngineDouble, ask: Callable[..., Awaitable[Generation]]) -> None:
        double.fail_next(fault)
        with pytest.raises(EngineBusy) as busy:
            await ask(stream)
        assert busy.value.retry_after_s == wait_s

    with_warm_engine(faulty, check)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_closed_idle_connection_is_replaced_without_an_error(faulty: Faulty, stream: bool) -> None:
    async def check(double: EngineDouble, ask: Callable[..., Awaitable[Generation]]) -> None:
        struck = double.faults.n_struck["close"]
        double.fail_next("close")
        assert len((await ask(stream)).response_ids) > 0
        assert double.faults.n_struck["close"] == struck + 1
        double.fail_next("close", 2)
        with pytest.raises(EngineError, match="broke off before it had answered"):
            await ask(stream)

    with_warm_engine(faulty, check)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_hanging_call_is_cancelled(faulty: Faulty, stream: bool) -> None:
    async def check(double: EngineDouble, ask: Callable[..., Awaitable[Generation]]) -> None:
        double.fail_next("hang")
        n_before = double.n_cancelled
        task = asyncio.ensure_future(ask(stream))
        await until(lambda: double.n_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: double.n_running == 0)
        assert double.n_cancelled == n_before + 1

    with_warm_engine(faulty, check)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_altered_prompt_is_returned_as_received(faulty: Faulty, stream: bool) -> None:
    async def check(double: EngineDouble, ask: Callable[..., Awaitable[Generation]]) -> None:
        double.fail_next("echo")
        seen = (await ask(stream)).prompt_ids
        assert seen is not None
        assert not np.array_equal(seen, PROMPT)
        seen = (await ask(stream)).prompt_ids
        assert seen is not None
        assert np.array_equal(seen, PROMPT)

    with_warm_engine(faulty, check)
