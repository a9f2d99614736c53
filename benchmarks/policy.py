"""Overhead and gains of the policy side: the farm's time per model call, drift of re-tokenizing, choice of engines,
prefix-cache hits, time from a cancel to an idle engine. The engines are test doubles with a known latency, so only the
farm's own time is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson

from benchmarks.choosers import Counter, LoadBalancer, Ours, RoundRobin
from farm.embedded.child_process import ChildProcess
from farm.records.engine_state import StoredEngine
from farm.records.request import SamplingParams
from farm.records.trajectory import Message, TokenIds
from testkit.report import Report, options
from workers.plugins.interfaces import Completion
from workers.policy.engines import detect, open_engine
from workers.policy.generation import Engine, EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.backend import address_of, record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.policy.tokens import tokenizer
from workers.testing.engine import ScriptedEngine
from workers.testing.serving import serving

SAMPLING = SamplingParams(temperature=1.0)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
_START_S = 60.0


def main() -> None:
    result = options(__doc__)
    report = Report("the policy side")
    asyncio.run(_all(report, result))
    report.show(result.json)


async def _all(report: Report, args: argparse.Namespace) -> None:
    for figure in (call_times, drift, choice, prefix_hits, cancelling):
        await figure(report, args)


@contextmanager
def double(*words: str) -> Iterator[tuple[str, ChildProcess]]:
    """Run a double in a separate process; yield its URL, ending in /v1."""
    with tempfile.TemporaryDirectory(prefix="farm-benchmark-") as folder:
        log = Path(folder) / "log"
        child = ChildProcess([sys.executable, "-u", "-m", "workers.testing.engine", "--random", *words], log=log)
        try:
            deadline = time.monotonic() + _START_S
            while not (result := [line for line in log.read_text().splitlines() if line.startswith("http://")]):
                if not child.running or time.monotonic() > deadline:
                    raise RuntimeError(f"the double did not start: {log.read_text()[-500:]}")
                time.sleep(0.02)
            yield f"{result[0].strip()}/v1", child
        finally:
            child.terminate()
            child.end(5.0)


async def listed(url: str) -> StoredEngine:
    address = EngineAddress(url)
    return record_of(address, await detect(address))


def _observation(n_chars: int, number: int) -> Message:
    line = f"{number}: the quick brown fox jumps over the lazy dog, and the dog does not mind at all\n"
    return {"role": "tool", "tool_call_id": "call_0", "content": (line * (n_chars // len(line) + 1))[:n_chars]}


def _after(completion: Completion, number: int, n_chars: int = 600) -> list[Message]:
    """Return the messages after a completion: the completion, and the results of its calls, or a user's message."""
    calls = completion.response.get("tool_calls") or []
    results = [{**_observation(n_chars, number), "tool_call_id": call["id"]} for call in calls]
    return [completion.response, *(results or [{"role": "user", "content": _observation(n_chars, number)["content"]}])]


async def call_times(report: Report, args: argparse.Namespace) -> None:
    """Compare a model call through the farm with a direct request whose answer is not even parsed."""
    with double("--mean-tokens", "32") as (url, _):
        pool = EnginePool(_Fleet([await listed(url)]))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(pool.aclose)
            client = await stack.enter_async_context(httpx2.AsyncClient(timeout=60))
            for n_context in (2_000, 16_000, 64_000):
                ours, raw = await _turns(pool, client, url, n_context, 10 if args.quick else 100)
                difference = statistics.median(ours) - statistics.median(raw)
                allowed = 3.0 + (0.05 * statistics.median(raw) * 1000 if n_context == 64_000 else 0.0)
                tag = f"{n_context // 1000}k"
                report.times(f"call_{tag}", ours, raw_http=statistics.median(raw) * 1000, raw_http_p99=_p99(raw))
                report.add(f"farm_time_per_call_{tag}_p50", difference * 1000, "ms", at_most=allowed)
                report.add(f"farm_time_per_call_{tag}_p99", _p99(ours) - _p99(raw), "ms")


def _p99(seconds: Sequence[float]) -> float:
    return sorted(value * 1000 for value in seconds)[int(len(seconds) * 0.99)]


async def _turns(
    pool: EnginePool, client: httpx2.AsyncClient, url: str, n_context: int, n_turns: int
) -> tuple[list[float], list[float]]:
    """Return the times of calls with a conversation of about so many tokens, through the farm and directly in turn."""
    policy = RolloutPolicy(StickyRouter(pool, RoutingKey(f"bench-{n_context}")), f"bench-{n_context}")
    messages: list[Message] = [{"role": "user", "content": _observation(1000, 0)["content"]}]
    completion = await policy.complete(messages, TOOLS, SAMPLING, 64)
    chars_per_token = 1000 / completion.n_prompt_tokens
    n_chars = int(n_context * chars_per_token / 60)
    while completion.n_prompt_tokens < n_context:
        messages += _after(completion, len(messages), n_chars)
        completion = await policy.complete(messages, TOOLS, SAMPLING, 64)
    ours, by_hand = [], []
    for number in range(n_turns):
        messages += _after(completion, number, 200)
        started = time.perf_counter()
        completion = await policy.complete(messages, TOOLS, SAMPLING, 64)
        ours.append(time.perf_counter() - started)
        assert completion.prompt_ids is not None
        body = _body(completion.prompt_ids)
        started = time.perf_counter()
        answer = await client.post(_generate(url), content=body, headers={"content-type": "application/json"})
        by_hand.append(time.perf_counter() - started)
        answer.raise_for_status()
    return ours, by_hand


def _generate(url: str) -> str:
    return url.removesuffix("/v1") + "/inference/v1/generate"


def _body(ids: TokenIds) -> bytes:
    sampling = {"temperature": 1.0, "max_tokens": 64, "logprobs": 0, "detokenize": False}
    return orjson.dumps(
        {"token_ids": ids, "sampling_params": sampling, "return_token_ids": True}, option=orjson.OPT_SERIALIZE_NUMPY
    )


async def drift(report: Report, args: argparse.Namespace) -> None:
    """Measure how often a turn's re-encoded text differs from its ids, and how often a prompt of ours does."""
    n_turns = 1_000 if args.quick else 10_000
    with double("--mean-tokens", "24") as (url, _):
        engine = await listed(url)
        assert engine.info is not None
        encode = tokenizer.load(engine.info.root).tokenizer
        pool = EnginePool(lambda: (engine,))
        result = await asyncio.gather(*[_drifting(pool, encode, index, n_turns // 8) for index in range(8)])
        await pool.aclose()
    n = sum(each.n_turns for each in result)
    report.add("drift_of_ours", sum(each.n_broken for each in result) / n, "of turns", at_most=0.0)
    report.add("drift_of_retokenising", sum(each.n_drifted for each in result) / n, "of turns", turns=float(n))


@dataclass(slots=True)
class _Drift:
    n_turns: int = 0
    n_broken: int = 0
    n_drifted: int = 0


async def _drifting(pool: EnginePool, encode: tokenizer.Tokenizer, index: int, n_turns: int) -> _Drift:
    """Run rollouts of 20 turns, until there are enough turns."""
    result = _Drift()
    while result.n_turns < n_turns:
        name = f"drift-{index}-{result.n_turns}"
        policy = RolloutPolicy(StickyRouter(pool, RoutingKey(name)), name)
        messages: list[Message] = [{"role": "user", "content": f"Problem {name}"}]
        held: TokenIds | None = None
        for turn in range(20):
            completion = await policy.complete(messages, TOOLS, SAMPLING, 96)
            assert completion.prompt_ids is not None
            assert completion.response_ids is not None
            kept = held is None or np.array_equal(completion.prompt_ids[: len(held)], held)
            result.n_broken += not kept or completion.mismatch is not None
            again = encode.encode(encode.decode(completion.response_ids))
            result.n_drifted += not np.array_equal(again, completion.response_ids)
            result.n_turns += 1
            held = np.concatenate([completion.prompt_ids, completion.response_ids])
            messages += _after(completion, turn, 80)
    return result


@dataclass(slots=True)
class _Fleet:
    """The present engines, for the pool and for its peers."""

    listed: list[StoredEngine]

    def __call__(self) -> Sequence[StoredEngine]:
        return tuple(self.listed)


async def choice(report: Report, args: argparse.Namespace) -> None:
    """Measure a batch's makespan on four uneven engines: one four times slower, one failing, one joining later."""
    n_groups, n_turns = (6, 4) if args.quick else (16, 6)
    result = {name: await _makespan(name, n_groups, n_turns) for name in ("counter", "round_robin", "ours")}
    for name in ("counter", "round_robin"):
        report.add(
            f"makespan_{name}_over_ours",
            result[name][0] / result["ours"][0],
            "x",
            at_least=1.3 if name == "counter" else None,
            theirs_s=result[name][0],
            ours_s=result["ours"][0],
            their_failed_rollouts=float(result[name][1]),
        )
    report.add("failed_rollouts_of_ours", float(result["ours"][1]), "rollouts", at_most=0.0)


async def _makespan(name: str, n_groups: int, n_turns: int) -> tuple[float, int]:
    """Return the seconds for all rollouts, and the number of failed ones."""
    fast = ("--tokens-per-s", "200", "--max-running", "4", "--mean-tokens", "24")
    slow = ("--tokens-per-s", "50", "--max-running", "4", "--mean-tokens", "24")
    with ExitStack() as stack:
        servers = [stack.enter_context(double(*words)) for words in (slow, fast, fast, fast)]
        last = servers.pop()
        engines = [await listed(url) for url, _ in servers]
        fleet = _Fleet(list(engines))
        pool = EnginePool(fleet)
        chooser, opened = _chooser(name, engines, fleet, pool)
        started = time.perf_counter()
        tasks = [
            asyncio.ensure_future(_rollout(chooser, f"g{group}", sample, n_turns))
            for group in range(n_groups)
            for sample in range(8)
        ]
        await asyncio.sleep(1.0)
        chooser.added(open_engine(address_of(added := await listed(last[0])), _info(added)))
        await asyncio.sleep(1.0)
        servers[2][1].process.kill()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        elapsed_s = time.perf_counter() - started
        await pool.aclose()
        for engine in opened:
            await engine.aclose()
    return elapsed_s, sum(isinstance(each, BaseException) for each in results)


def _info(engine: StoredEngine) -> Any:
    assert engine.info is not None
    return engine.info


def _chooser(
    name: str, engines: Sequence[StoredEngine], fleet: _Fleet, pool: EnginePool
) -> tuple[LoadBalancer, Sequence[Engine]]:
    if name == "ours":
        return Ours(pool, lambda engine: fleet.listed.append(record_of(engine.address, engine.info))), ()
    opened = [open_engine(address_of(each), _info(each)) for each in engines]
    return (Counter if name == "counter" else RoundRobin)(opened), opened


async def _rollout(chooser: LoadBalancer, group: str, sample: int, n_turns: int) -> None:
    name = f"{group}-{sample}"
    policy = RolloutPolicy(chooser.router(RoutingKey(name, group)), name)  # type: ignore[arg-type]
    messages: list[Message] = [{"role": "user", "content": f"Problem {group}: {_observation(1500, 1)['content']}"}]
    sampling = SamplingParams(temperature=1.0, seed=sample)
    for turn in range(n_turns):
        completion = await policy.complete(messages, TOOLS, sampling, 96)
        messages += _after(completion, turn, 200)


async def prefix_hits(report: Report, args: argparse.Namespace) -> None:
    """Compare the cached prompt tokens of several engines with those of a single engine."""
    n_groups, n_turns = (8, 4) if args.quick else (32, 6)
    hits = {}
    for name, n_engines in (("possible", 1), ("ours", 4), ("round_robin", 4)):
        hits[name] = await _hits("ours" if name == "possible" else name, n_engines, n_groups, n_turns)
    report.add(
        "prefix_hits_of_possible",
        hits["ours"] / hits["possible"] * 100,
        "%",
        at_least=95,
        round_robin_per_call=hits["round_robin"] / hits["possible"] * 100,
    )


async def _hits(name: str, n_engines: int, n_groups: int, n_turns: int) -> float:
    """Return the share of cached prompt tokens."""
    with ExitStack() as stack:
        doubles = [ScriptedEngine(tokens_per_s=2_000, mean_tokens=24) for _ in range(n_engines)]
        urls = [stack.enter_context(serving(each.app())) for each in doubles]
        engines = [await listed(f"{url}/v1") for url in urls]
        fleet = _Fleet(list(engines))
        pool = EnginePool(fleet)
        chooser, opened = _chooser(name, engines, fleet, pool)
        for start in range(0, n_groups, 8):
            # the first sample of a group starts first, as it does when sandboxes start one after another
            groups = [f"g{group}" for group in range(start, min(start + 8, n_groups))]
            await asyncio.gather(*[_rollout(chooser, group, 0, n_turns) for group in groups])
            rest = [_rollout(chooser, group, sample, n_turns) for group in groups for sample in range(1, 8)]
            await asyncio.gather(*rest)
        await pool.aclose()
        for engine in opened:
            await engine.aclose()
    return sum(each.n_prefix_hits for each in doubles) / sum(each.n_prefix_queries for each in doubles)


async def cancelling(report: Report, args: argparse.Namespace) -> None:
    """Measure the time from the cancel of a rollout until its engine samples nothing."""
    times = []
    engine = ScriptedEngine(tokens_per_s=50, mean_tokens=10_000)
    with serving(engine.app()) as url:
        pool = EnginePool(_Fleet([await listed(f"{url}/v1")]))
        for index in range(5 if args.quick else 50):
            policy = RolloutPolicy(StickyRouter(pool, RoutingKey(f"c{index}")), f"c{index}")
            call = asyncio.ensure_future(
                policy.complete([{"role": "user", "content": f"Problem {index}"}], TOOLS, SAMPLING, 20_000)
            )
            await _until(lambda: engine.n_running == 1)
            started = time.perf_counter()
            call.cancel()
            await _until(lambda: engine.n_running == 0)
            times.append(time.perf_counter() - started)
        await pool.aclose()
    report.times("cancel_to_idle_engine", times, at_most=200)


async def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the engine does not do what is expected")
        await asyncio.sleep(0.001)


if __name__ == "__main__":
    main()
