"""Promises of every engine client, whichever server is behind it: a scripted one, or a real vLLM.

Those of TOKEN_PROMISES hold for each kind of server that takes token ids. The others require more: the prompt as the
server saw it, ids in its chat, several models, and control.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx2
import numpy as np
import pytest
from tokenizers import Tokenizer

from farm.errors import LimitReached
from farm.records.engine import EngineInfo, PauseMode
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import TokenIds, token_ids
from workers.policy.engines import detect, open_engine
from workers.policy.generation import ChatRequest, Engine, EngineAddress, EngineBusy, EngineRefused, Generation

_SOON_S = 60.0
_ANSWER_S = 300.0
"""A server on a busy CPU is slow; speed is not measured here."""
_POLL_S = 0.02
_TRIES = 10
_LONG = 400
"""Tokens of a generation that must still run when it is paused; few enough for a server on a CPU."""

_RUNNING = re.compile(
    r"^(?:vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing)(?:{.*})? ([0-9.e+]+)$", re.M
)
"""The metric of running requests, by server."""

_long: dict[EngineAddress, SamplingParams] = {}
"""Found once for each server, as it takes a real one seconds."""


@dataclass
class Bench:
    """One server, and an engine opened on it. `spans`: it reports weight versions."""

    engine: Engine
    tokenizer: Tokenizer
    spans: bool = True
    prompt: TokenIds = field(default_factory=lambda: token_ids([5, 9, 11, 70, 71, 72, 100]))

    async def generate(self, n: int = 16, seed: int | None = 1, **more: Any) -> Generation:
        sampling = more.pop("sampling", SamplingParams(seed=seed))
        return await self.engine.generate(more.pop("prompt", self.prompt), sampling, n, **more)

    async def long(self) -> SamplingParams:
        """Return sampling that continues for _LONG tokens."""
        if self.engine.address not in _long:
            for seed in range(100):
                sampling = SamplingParams(seed=seed)
                if (await self.generate(_LONG, sampling=sampling)).finish_reason == "length":
                    _long[self.engine.address] = sampling
                    break
        return _long[self.engine.address]

    async def begun(self, n: int = _LONG) -> tuple[asyncio.Task[Generation], list[int]]:
        """Start a generation, and return it once some ids have arrived."""
        sampling, came, first = await self.long(), [], asyncio.Event()

        def take(ids: Any) -> None:
            came.extend(ids)
            first.set()

        task = asyncio.create_task(self.generate(n, sampling=sampling, on_ids=take))
        await asyncio.wait_for(first.wait(), _SOON_S)
        return task, came

    async def paused(self, mode: PauseMode) -> tuple[asyncio.Task[Generation], list[int]]:
        """Return a generation that a pause caught while it ran; those that were over by then do not count."""
        for _ in range(_TRIES):
            task, came = await self.begun()
            await self.engine.pause(mode)
            done, _ = await asyncio.wait([task], timeout=_SOON_S if mode == "abort" else 0)
            met = not done if mode == "keep" else task.result().finish_reason == "abort"
            if met:
                return task, came
            await self.engine.resume()
        raise AssertionError(f"no pause of {_TRIES} met a generation")

    async def n_running(self) -> int:
        """Return the number of running requests by the server's own count."""
        root = self.engine.address.url.removesuffix("/v1")
        async with httpx2.AsyncClient() as client:
            text = (await client.get(f"{root}/metrics")).text
        result = _RUNNING.findall(text)
        return int(sum(map(float, result)))

    async def idle(self) -> None:
        async with asyncio.timeout(_SOON_S):
            while await self.n_running():  # noqa: ASYNC110 (another process counts them)
                await asyncio.sleep(_POLL_S)


Promise = Callable[[Bench], Awaitable[None]]
PROMISES: list[Promise] = []
TOKEN_PROMISES: list[Promise] = []


def promise(check: Promise) -> Promise:
    PROMISES.append(check)
    return check


def token_promise(check: Promise) -> Promise:
    TOKEN_PROMISES.append(check)
    return promise(check)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SOON_S):
        while not condition():  # noqa: ASYNC110 (it comes true in another thread)
            await asyncio.sleep(_POLL_S)


def check_promise(url: str, check: Promise, tokenizer: Tokenizer, *, spans: bool, **info: Any) -> None:
    """Check one promise on a server; `info` replaces what detection would choose."""
    asyncio.run(_check(EngineAddress(f"{url}/v1"), check, tokenizer, spans, info))


async def _check(
    address: EngineAddress, check: Promise, tokenizer: Tokenizer, spans: bool, info: dict[str, Any]
) -> None:
    engine_info = await detect(address, timeout_s=_ANSWER_S)
    engine = open_engine(address, engine_info.model_copy(update=info), timeout_s=_ANSWER_S)
    try:
        await check(Bench(engine, tokenizer, spans))
    finally:
        # A broken promise must not break the following ones.
        if engine_info.control:
            await engine.resume()
        await engine.aclose()


@promise
async def prompt_ids_are_those_sent(bench: Bench) -> None:
    for generation in (await bench.generate(), await bench.generate(on_ids=lambda _: None)):
        _check_prompt_ids(generation, bench)


def _check_prompt_ids(generation: Generation, bench: Bench) -> None:
    assert generation.prompt_ids is not None
    assert np.array_equal(generation.prompt_ids, bench.prompt)
    assert generation.prompt_ids.dtype == generation.response_ids.dtype == np.int32


@token_promise
async def every_id_has_a_log_probability(bench: Bench) -> None:
    generation = await bench.generate(40)
    assert generation.response_logprobs is not None
    assert 1 <= len(generation.response_ids) == len(generation.response_logprobs) <= 40
    assert generation.response_logprobs.dtype == np.float32
    assert (generation.response_logprobs <= 0).all()
    assert (generation.response_logprobs < 0).any()


@token_promise
async def versions_cover_the_response(bench: Bench) -> None:
    generation = await bench.generate(9)
    ends = [0, *(span.end for span in generation.versions)]
    assert [span.start for span in generation.versions] == ends[:-1]
    assert ends[-1] == (len(generation.response_ids) if bench.spans else 0)


@token_promise
async def same_seed_gives_the_same_ids(bench: Bench) -> None:
    one, same, other = [await bench.generate(24, seed) for seed in (7, 7, 8)]
    assert np.array_equal(one.response_ids, same.response_ids)
    assert not np.array_equal(one.response_ids, other.response_ids)


@token_promise
async def max_tokens_ends_the_generation(bench: Bench) -> None:
    sampling = await bench.long()
    generation = await bench.generate(12, sampling=sampling)
    assert len(generation.response_ids) == 12
    assert generation.finish_reason == "length"
    assert generation.stop_reason is None


@token_promise
async def stop_string_ends_the_generation_and_keeps_its_tokens(bench: Bench) -> None:
    sampling = await bench.long()
    whole = await bench.generate(60, sampling=sampling)
    text = bench.tokenizer.decode(whole.response_ids.tolist())
    stop = next(letter for letter in text[2:] if letter.isascii() and letter.isprintable())
    generation = await bench.generate(60, sampling=sampling.model_copy(update={"stop": (stop,)}))
    assert generation.finish_reason == "stop"
    assert generation.stop_reason == stop
    assert np.array_equal(generation.response_ids, whole.response_ids[: len(generation.response_ids)])
    assert stop in bench.tokenizer.decode(generation.response_ids.tolist())


@token_promise
async def full_context_is_reported_as_a_limit(bench: Bench) -> None:
    size = bench.engine.info.context_tokens
    assert size is not None
    for unaware in (False, True):
        info = bench.engine.info.model_copy(update={"context_tokens": None} if unaware else {})
        engine = open_engine(bench.engine.address, info)
        try:
            for n in (size, size + 50):
                with pytest.raises(LimitReached) as limit:
                    await engine.generate(token_ids([5] * n), SamplingParams(), 8)
                assert limit.value.outcome is Outcome.CONTEXT_FULL
            cut = await engine.generate(token_ids([5] * (size - 3)), SamplingParams(), 50)
            assert 1 <= len(cut.response_ids) <= 3
        finally:
            await engine.aclose()


@promise
async def unknown_model_is_refused(bench: Bench) -> None:
    with pytest.raises(EngineRefused, match=rf"{bench.engine.address.url}.*nope"):
        await bench.generate(model="nope")


@token_promise
async def unknown_token_is_refused(bench: Bench) -> None:
    with pytest.raises(EngineRefused, match="tokenizer is not this model's"):
        await bench.generate(prompt=token_ids([10_000_000]))


@token_promise
async def streamed_pieces_equal_the_response(bench: Bench) -> None:
    sampling, pieces = await bench.long(), []
    streamed = await bench.generate(50, sampling=sampling, on_ids=lambda ids: pieces.append(list(ids)))
    assert len(pieces) > 1
    assert list(chain(*pieces)) == streamed.response_ids.tolist()
    whole = await bench.generate(50, sampling=sampling)
    assert np.array_equal(streamed.response_ids, whole.response_ids)
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.versions == whole.versions
    assert (streamed.prompt_ids is None) == (whole.prompt_ids is None)
    assert streamed.prompt_ids is None or np.array_equal(streamed.prompt_ids, bench.prompt)


@promise
async def concurrent_calls_get_their_own_results(bench: Bench) -> None:
    prompts = [token_ids([5, 6, 7, index + 20]) for index in range(64)]
    result = await asyncio.gather(*[bench.generate(8, index, prompt=prompt) for index, prompt in enumerate(prompts)])
    for prompt, generation in zip(prompts, result, strict=True):
        assert generation.prompt_ids is not None
        assert np.array_equal(generation.prompt_ids, prompt)


@token_promise
async def cached_tokens_are_reported(bench: Bench) -> None:
    prompt = token_ids([number % 200 for number in range(600)])
    for _ in range(2):
        generation = await bench.generate(4, prompt=prompt)
    assert generation.n_cached_tokens is not None
    assert 300 < generation.n_cached_tokens < 600


@token_promise
async def cancelled_call_leaves_the_engine_idle(bench: Bench) -> None:
    await bench.idle()
    for stream in (True, False):
        on_ids = (lambda _: None) if stream else None
        for _ in range(_TRIES):
            sampling = await bench.long()
            tasks = [asyncio.create_task(bench.generate(1500, sampling=sampling, on_ids=on_ids)) for _ in range(3)]
            while not await bench.n_running() and not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=_POLL_S)
            n_left = sum(task.cancel() for task in tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
            if n_left:
                break
        else:
            raise AssertionError(f"all calls were over before they could be cancelled, {_TRIES} times")
        await bench.idle()
    assert len((await bench.generate(3)).response_ids) >= 1


@promise
async def call_kept_over_an_update_reports_both_versions(bench: Bench) -> None:
    await bench.engine.set_version("11")
    task, came = await bench.paused("keep")
    await bench.engine.set_version("12")
    assert await bench.engine.version() == "12"
    await bench.engine.resume()
    generation = await task
    assert generation.finish_reason == "length"
    assert generation.response_ids.tolist() == came
    if bench.spans:
        assert [span.version for span in generation.versions] == ["11", "12"]
        assert 0 < generation.versions[0].end < _LONG


@promise
async def aborted_call_keeps_its_sampled_tokens(bench: Bench) -> None:
    task, came = await bench.paused("abort")
    generation = await task
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.response_ids) == len(came) < _LONG
    await bench.engine.resume()
    further = await bench.generate(5, prompt=np.concatenate([bench.prompt, generation.response_ids]))
    assert len(further.response_ids) >= 1


@promise
async def drain_waits_for_running_calls(bench: Bench) -> None:
    task, _ = await bench.begun()
    await bench.engine.pause("drain")
    assert not await bench.n_running()
    generation = await task
    assert generation.finish_reason == "length"
    waiting = asyncio.create_task(bench.generate(4))
    await bench.engine.set_version("21")
    await bench.engine.resume()
    try:
        after = await waiting
    except EngineBusy:
        after = await bench.generate(4)
    if bench.spans:
        assert {span.version for span in after.versions} == {"21"}


@promise
async def chat_returns_exact_ids(bench: Bench) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    template_kwargs = {"enable_thinking": True}
    completion = await bench.engine.chat(
        ChatRequest(hello, 12, SamplingParams(seed=1), template_kwargs=template_kwargs)
    )
    assert completion.response["role"] == "assistant"
    assert completion.prompt_ids is not None
    assert completion.response_ids is not None
    assert completion.response_logprobs is not None
    assert len(completion.prompt_ids) == completion.n_prompt_tokens
    assert len(completion.response_ids) == len(completion.response_logprobs) == completion.n_response_tokens
    assert "Hello" in bench.tokenizer.decode(completion.prompt_ids.tolist())


@promise
async def engine_kind_is_detected(bench: Bench) -> None:
    engine_info: EngineInfo = await detect(bench.engine.address, timeout_s=_ANSWER_S)
    assert engine_info.token_in in (bench.engine.info.token_in, "generate")
    assert engine_info.token_out
    assert engine_info.control
    assert engine_info.context_tokens is not None
    assert engine_info.logprobs == ("processed" if engine_info.kind == "sglang" else "raw")
    assert engine_info.model
    assert await bench.engine.healthy()
