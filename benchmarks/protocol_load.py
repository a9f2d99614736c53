"""Hundreds of concurrent requests of another system's protocol: memory of the API, and latencies of its answers.

Each protocol is a `ProtocolLoad`: orders before and after a round, and the turns of a round, in each of which all
requests are in flight at the same time. The rollouts are empty, and so are the commands of trajectories, whose
sandboxes all run at the same time, so only the API is measured. Memory is the maximum of the process in a round: in the
first round for code and connections; growth in later rounds is memory that is not freed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from farm.embedded.embedded_farm import Embedded
from farm.settings import Settings
from testkit.processes import cpu_s, forget_peak, peak_mb
from testkit.report import Report, options
from workers.testing import plugin_path

KEY = "of-this-benchmark"
NODE_OPTIONS = ("--init", "16", "--run", "64", "--eval", "16")
_ROOM = ("--init", "16", "--run", "512", "--eval", "16")
_PATIENT = {"FARM_VERL_TOOL_WAIT_S": "600", "FARM_VERL_TOOL_ACTION_S": "300"}
_RUN_S = 0.5
"""Seconds that an empty rollout sleeps, so that all requests of a round wait at the same time."""


@dataclass(frozen=True, slots=True)
class ProtocolLoad:
    """One protocol: (path, body) of the orders around a round, and of a client's requests in its turns."""

    before: tuple[tuple[str, Any], ...]
    turns: tuple[Callable[[int], tuple[str, Any]], ...]
    after: tuple[tuple[str, Any], ...]
    is_answered: Callable[[Any], bool]
    node_options: tuple[str, ...] = NODE_OPTIONS


def _process(index: int) -> tuple[str, Any]:
    instance = {"data_source": "noop", "seconds": _RUN_S, "trajectory_id": index}
    return "/process", {"instance": instance, "sampling_params": {"max_iterations": 30}}


def _action(index: int) -> tuple[str, Any]:
    return "/get_observation", {"trajectory_ids": [f"t{index}"], "actions": ["<bash>echo hi</bash>"]}


def _finish(index: int) -> tuple[str, Any]:
    return "/get_observation", {"trajectory_ids": [f"t{index}"], "actions": [""], "finish": [True]}


LOADS: Mapping[str, ProtocolLoad] = {
    "prorl": ProtocolLoad(
        before=(("/add_llm_server", {"address": "http://127.0.0.1:9"}), ("/start", None)),
        turns=(_process,),
        after=(("/stop", None),),
        is_answered=lambda result: result["resolved"] is True,
    ),
    "verl-tool": ProtocolLoad(
        before=(),
        turns=(_action, _action, _action, _finish),
        after=(),
        is_answered=lambda result: result["valids"] == [True],
        node_options=_ROOM,
    ),
}


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    n, n_rounds = (100, 2) if result.quick else (500, 6)
    report = Report(f"{n} requests of a protocol at a time")
    for name in LOADS:
        measure(report, name, n, n_rounds)
    report.show(result.json)


def measure(report: Report, name: str, n: int, n_rounds: int) -> None:
    """Run rounds of a protocol on a new farm."""
    load = LOADS[name]
    with tempfile.TemporaryDirectory(prefix="farm-load-") as folder:
        # its home is closed to the sandboxes' user, who must pass through the folder to reach the scratch next to it
        Path(folder).chmod(0o755)
        home, scratch = Path(folder) / "home", Path(folder) / "scratch"
        settings = Settings(home=home, scratch=scratch, broker_url="", sandbox="namespace")
        with (
            Embedded(settings, node_options=load.node_options, flower=False) as here,
            api_process(here.home, name) as (url, process),
        ):
            asyncio.run(run_rounds(report, name, load, f"{url}/{name}", process.pid, n, n_rounds))


@contextmanager
def api_process(home: Path, name: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run an API process that serves a protocol."""
    command = [str(Path(sys.executable).parent / "farm"), "api", "--url", str(home), "--port", "0", "--speak", name]
    env = os.environ | {"FARM_HOME": str(home), "FARM_API_KEY": KEY, **_PATIENT}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()
        process.wait(30)


async def run_rounds(report: Report, name: str, load: ProtocolLoad, url: str, pid: int, n: int, n_rounds: int) -> None:
    """Run rounds of `n` concurrent requests, and add their figures."""
    memory: list[float] = []
    late: list[float] = []
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"x-api-key": KEY}
    began, spent = time.perf_counter(), cpu_s([pid])
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=600.0, limits=limits) as client:
        for _ in range(n_rounds):
            await _orders(client, load.before)
            forget_peak(pid)
            for turn in load.turns:
                started = time.perf_counter()
                answers = [asyncio.create_task(_request_s(client, load, *turn(index))) for index in range(n)]
                late += [await answer - started for answer in answers]
            memory.append(peak_mb(pid))
            await _orders(client, load.after)
    seconds = time.perf_counter() - began
    late.sort()
    report.add(f"{name}_memory_first_round", memory[0], "MB")
    report.add(f"{name}_memory_last_round", memory[-1], "MB", rounds=n_rounds, growth=memory[-1] - memory[0])
    report.add(
        f"{name}_answers",
        len(late) / seconds,
        "requests/s",
        p50_s=statistics.median(late),
        p99_s=late[len(late) * 99 // 100],
    )
    report.add(f"{name}_cpu_of_the_api", 1000 * (cpu_s([pid]) - spent) / len(late), "ms/request")


async def _orders(client: httpx2.AsyncClient, orders: tuple[tuple[str, Any], ...]) -> None:
    for path, body in orders:
        answer = await (client.post(path) if body is None else client.post(path, json=body))
        answer.raise_for_status()


async def _request_s(client: httpx2.AsyncClient, load: ProtocolLoad, path: str, body: Any) -> float:
    answer = await client.post(path, json=body)
    answer.raise_for_status()
    if not load.is_answered(answer.json()):
        raise RuntimeError(f"{path} was answered by {answer.text[:500]}")
    return time.perf_counter()


if __name__ == "__main__":
    main()
