"""Cost of the recording gateway for a call of an agent program, compared with a bare reverse proxy to the same engine.

The engine is a double that answers after a fixed time. Agents have growing conversations, one rollout each, with all
gateways in one process as in a run worker; nothing is recorded in a store. The proxy, and the engine itself, are called
with token ids. The *added* time is the time beyond that of direct calls to the engine in the same run.

`in flight` are calls that the engine holds for 8 s each, as a long answer takes, and that begin at any time: up to
2,048 at once, and none may be late by half a minute. `in flight within 100 ms` is the most calls with a 99th percentile
of the added time below that.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks.policy import double
from farm.embedded.child_process import ChildProcess
from farm.startup import limit_full_collections
from testkit.processes import cpu_s, memory_mb
from testkit.report import Report, options

LATENCY_S = 1.0
N_AGENTS = (1, 64, 256)
HELD_S = 8.0
N_IN_FLIGHT = (64, 128, 256, 512, 1024, 2048)
_N_CALLS = {256: 10}
"""Calls per agent if not 3: of 768 calls, those during a garbage collection, one a minute, can be 1 %."""
AT_256_MS = 25.0
BENT_MS = 100.0
_LATE_S = 30.0
_START_S = 120.0
_DOUBLE = ("--mean-tokens", "32", "--keep-alive-s", "600")
_CHAT, _GENERATE = "/v1/chat/completions", "/inference/v1/generate"
_SYSTEM = "You are a careful engineer. " * 250
_OBSERVATION = "the quick brown fox jumps over the lazy dog, and the dog does not mind\n" * 3
_HUGE_CHARS = 15_000_000
_N_SMALL_AGENTS = 16
_HELD_TOKENS_PER_S = "0.2"


def main() -> None:
    result = options(__doc__)
    report = Report("the recording gateway")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # the clients of 2,048 conversations must not stop for their own garbage collection while they measure
    limit_full_collections()
    asyncio.run(_all(report, result.quick))
    report.show(result.json)


async def _all(report: Report, quick: bool) -> None:
    with _served(max(N_AGENTS), "--latency-s", str(LATENCY_S)) as (engine, at_proxy, at_gateway):
        for stream in (False, True):
            for n in N_AGENTS:
                n_calls = {1: 4 if quick else 12}.get(n, 2 if quick else 5)
                await _row(report, stream, n_calls, [engine] * n, at_proxy, at_gateway)
        await _huge_bodies(report, at_gateway[0][:_N_SMALL_AGENTS], 6 if quick else 20)
    with _served(64) as (_, (proxied, _), (ours, _)):
        n_calls = 3 if quick else 10
        rate = (await _load(ours, n_calls, False)).rate
        report.add("calls_without_latency", rate, "/s", proxy=(await _load([proxied] * 64, n_calls, False)).rate)
    await _in_flight(report, quick)
    await _memory(report)


@contextmanager
def _served(n: int, *words: str) -> Iterator[tuple[str, tuple[str, ChildProcess], tuple[list[str], ChildProcess]]]:
    """Yield an engine, a proxy to it, and the gateways of n rollouts."""
    with double(*_DOUBLE, *words) as (engine, _), proxy(engine) as proxied, gateways(engine, n) as ours:
        yield engine, proxied, ours


@dataclass(slots=True)
class _LoadTimes:
    """The times of all calls, their total time, and the number of calls without an answer in time."""

    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    n_late: int = 0

    @property
    def rate(self) -> float:
        return len(self.times) / self.seconds

    def at(self, share: float) -> float:
        """Return a percentile, in ms."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


async def _row(
    report: Report,
    stream: bool,
    n_calls: int,
    direct: Sequence[str],
    proxy: tuple[str, ChildProcess],
    ours: tuple[Sequence[str], ChildProcess],
) -> None:
    n, name = len(direct), "stream" if stream else "whole"
    # the first calls load tokenizers and open connections
    await _load([direct[0], proxy[0], *ours[0][:n]], 1, stream)
    direct_times = await _load(direct, n_calls, stream)
    spent = cpu_s([proxy[1].process.pid])
    proxied = await _load([proxy[0]] * n, n_calls, stream)
    proxy_cpu = cpu_s([proxy[1].process.pid]) - spent
    spent = cpu_s([ours[1].process.pid])
    here = await _load(ours[0][:n], n_calls, stream)
    cpu = cpu_s([ours[1].process.pid]) - spent
    for tag, share in (("p50", 0.5), ("p99", 0.99)):
        added, proxy_added = here.at(share) - direct_times.at(share), proxied.at(share) - direct_times.at(share)
        report.add(
            f"added_{name}_{n}_agents_{tag}", added, "ms", proxy=proxy_added, engine_alone=direct_times.at(share)
        )
    report.add(f"calls_{name}_{n}_agents", here.rate, "/s", proxy=proxied.rate, engine_alone=direct_times.rate)
    each = len(here.times) / 1000
    report.add(f"cpu_{name}_{n}_agents", cpu / each, "ms/call", proxy=proxy_cpu / each)


async def _in_flight(report: Report, quick: bool) -> None:
    """Report the time that gateways and proxy add to calls, by the number of open calls."""
    added: dict[str, float]
    within = {"gateways": 0, "proxy": 0}
    bent: set[str] = set()
    for n in N_IN_FLIGHT:
        with _served(n, "--latency-s", str(HELD_S)) as (engine, (through_proxy, _), (ours, ours_child)):
            await _load([engine, through_proxy, *ours], 1, False, spread_s=HELD_S)
            n_calls = 1 if quick else _N_CALLS.get(n, 3)
            direct_times = await _load([engine] * n, n_calls, False, spread_s=HELD_S)
            proxied = await _load([through_proxy] * n, n_calls, False, spread_s=HELD_S)
            spent = cpu_s([ours_child.process.pid])
            here = await _load(ours, n_calls, False, spread_s=HELD_S)
            cpu = cpu_s([ours_child.process.pid]) - spent
        for tag, share in (("p50", 0.5), ("p99", 0.99)):
            added = {
                "gateways": here.at(share) - direct_times.at(share),
                "proxy": proxied.at(share) - direct_times.at(share),
            }
            aim = AT_256_MS if (n, tag) == (256, "p99") else None
            report.add(f"added_{n}_in_flight_{tag}", added["gateways"], "ms", at_most=aim, proxy=added["proxy"])
        bent |= {name for name, late in added.items() if late > BENT_MS}
        within |= dict.fromkeys(within.keys() - bent, n)
        report.add(f"cores_{n}_in_flight", cpu / here.seconds, "", calls_per_s=here.rate)
        report.add(f"late_{n}_in_flight", here.n_late, "calls", at_most=0, proxy=proxied.n_late)
    report.add("in_flight_within_100_ms", within["gateways"], "calls", proxy=within["proxy"])


async def _huge_bodies(report: Report, urls: Sequence[str], n_calls: int) -> None:
    """Measure the calls of other rollouts while one rollout sends bodies of 15 MB."""
    others, (sender, *_) = urls[1:], urls
    without = await _load(others, n_calls, False)
    bodies = asyncio.ensure_future(_sends_huge_bodies(sender))
    meanwhile = await _load(others, n_calls, False)
    bodies.cancel()
    with suppress(asyncio.CancelledError):
        await bodies
    for tag, share in (("p50", 0.5), ("p99", 0.99)):
        report.add(f"call_beside_huge_bodies_{tag}", meanwhile.at(share), "ms", without=without.at(share))


async def _sends_huge_bodies(url: str) -> None:
    text = "word " * (_HUGE_CHARS // 5)
    body = orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 8})
    client = _Client(url, _CHAT, may_fail=True)
    while True:
        await client.post(body)


async def _memory(report: Report) -> None:
    """Measure the memory of the gateways' process with 256 waiting calls, beyond its memory before."""
    with (
        double("--mean-tokens", "10000", "--tokens-per-s", _HELD_TOKENS_PER_S) as (engine, _),
        gateways(engine, 256) as (ours, process),
    ):
        pid = process.process.pid
        idle = memory_mb(pid)
        waiting = [asyncio.ensure_future(_Agent(url, True).call()) for url in ours]
        await _steady(lambda: memory_mb(pid))
        held = memory_mb(pid) - idle
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    report.add("memory_per_open_call", held / len(ours) * 1000, "kB", gateways_idle_mb=idle)


async def _steady(measure: Callable[[], float]) -> None:
    """Wait until a figure no longer grows."""
    last, same = measure(), 0
    while same < 5:
        await asyncio.sleep(1.0)
        last, before = measure(), last
        same = same + 1 if abs(last - before) < 0.1 else 0


async def _load(urls: Sequence[str], n_calls: int, stream: bool, spread_s: float = 0.0) -> _LoadTimes:
    """Let an agent for each address make its calls, one after the other. They begin within `spread_s`."""
    times, drawn = _LoadTimes(), random.Random(0)
    started = time.perf_counter()
    await asyncio.gather(*(_conversation(times, url, n_calls, stream, drawn.uniform(0, spread_s)) for url in urls))
    times.seconds = time.perf_counter() - started
    return times


async def _conversation(times: _LoadTimes, url: str, n_calls: int, stream: bool, begin_s: float) -> None:
    agent = (_Agent if "/t/" in url else _ByHand)(url, stream)
    await asyncio.sleep(begin_s)
    for _ in range(n_calls):
        started = time.perf_counter()
        await agent.call()
        times.times.append(time.perf_counter() - started)
        times.n_late += times.times[-1] > HELD_S + _LATE_S
    agent.client.close()


class _Client:
    """A minimal client on one connection: two cores run the engine, the gateway and all clients."""

    def __init__(self, url: str, path: str, may_fail: bool = False) -> None:
        self._host, _, prefix = url.removesuffix("/v1").removeprefix("http://").partition("/")
        self._path = f"/{prefix}{path}" if prefix else path
        self._may_fail = may_fail
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> bytes:
        if self._connection is None:
            host, port = self._host.split(":")
            self._connection = await asyncio.open_connection(host, int(port))
        reader, writer = self._connection
        head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        fields = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not fields.startswith(b"http/1.1 200") and not self._may_fail:
            raise RuntimeError(f"{self._host}{self._path} answered {fields.decode()} {await reader.read(500)!r}")
        if b"transfer-encoding: chunked" not in fields:
            n_bytes = int(fields.partition(b"content-length:")[2].partition(b"\r\n")[0])
            return await reader.readexactly(n_bytes)
        pieces = []
        while n_bytes := int(await reader.readline(), 16):
            pieces.append((await reader.readexactly(n_bytes + 2))[:-2])
        await reader.readline()
        return b"".join(pieces)

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()


class _Agent:
    """A conversation with a gateway, in messages."""

    def __init__(self, url: str, stream: bool) -> None:
        self.client = _Client(url, _CHAT)
        self._stream = stream
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}]

    async def call(self) -> None:
        self._messages.append({"role": "user", "content": _OBSERVATION})
        body = {"model": "", "messages": self._messages, "max_tokens": 64, "stream": self._stream}
        answer = await self.client.post(orjson.dumps(body))
        self._messages.append({"role": "assistant", "content": _answer_text(answer, self._stream)})


class _ByHand:
    """The same with the engine, or with a proxy to it, with ids: a prompt of about the same length, and no template."""

    def __init__(self, url: str, stream: bool) -> None:
        self.client = _Client(url, _GENERATE)
        self._stream = stream
        self._ids = [7] * (len(_SYSTEM) // 4)

    async def call(self) -> None:
        self._ids += [9] * 100
        sampling = {"temperature": 1.0, "max_tokens": 64, "logprobs": 0, "detokenize": False}
        body = {"token_ids": self._ids, "sampling_params": sampling, "return_token_ids": True, "stream": self._stream}
        await self.client.post(orjson.dumps(body))


def _answer_text(answer: bytes, stream: bool) -> str:
    if not stream:
        return str(orjson.loads(answer)["choices"][0]["message"]["content"] or "")
    events = [orjson.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@contextmanager
def proxy(engine: str) -> Iterator[tuple[str, ChildProcess]]:
    with _process("benchmarks.peers.reverse_proxy", engine) as (line, child):
        yield line, child


@contextmanager
def gateways(engine: str, n: int) -> Iterator[tuple[list[str], ChildProcess]]:
    with _process("benchmarks.gateway_host", engine, str(n)) as (line, child):
        yield json.loads(line), child


@contextmanager
def _process(module: str, *words: str) -> Iterator[tuple[str, ChildProcess]]:
    """Run a module until the block ends; yield the first line that it prints."""
    with tempfile.TemporaryDirectory(prefix="farm-benchmark-") as folder:
        log = Path(folder) / "log"
        child = ChildProcess([sys.executable, "-u", "-m", module, *words], log=log)
        try:
            deadline = time.monotonic() + _START_S
            while not log.exists() or not (text := log.read_text()).startswith(("http", "[")) or "\n" not in text:
                if not child.running or time.monotonic() > deadline:
                    raise RuntimeError(f"{module} did not start: {log.read_text()[-500:]}")
                time.sleep(0.02)
            yield text.partition("\n")[0], child
        finally:
            child.terminate()
            child.end(10.0)


if __name__ == "__main__":
    main()
