"""HTTP compared with direct database access: requests per second and latencies.

Measures the verbs and calls to a borrowed sandbox; commands in shells by our own verb and as SWE-ReX sends them; then
500 concurrent requests of two protocols of other systems, with the memory of the API's process.

Both clients use the same SQLite farm in turns, from as many threads. Rollouts are empty, and the node that runs them
takes its share of the machine from both.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import httpx2

import farm
from benchmarks.protocol_load import KEY, LOADS, NODE_OPTIONS, api_process, measure
from farm.client.farm import Farm
from farm.client.sandboxes.borrower import LentHandle
from farm.embedded.embedded_farm import Embedded
from farm.settings import Settings, settings
from testkit.report import Report, options
from workers.testing import plugin_path

Client = TypeVar("Client")

THREADS = 8
NOOP = {"data_source": "noop", "fields": {}}
_STREAMED = 64


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    n, n_turns = (100, 1) if result.quick else (400, 3)
    report = Report(f"the API against the database, {THREADS} threads each")
    os.environ["FARM_API_KEY"] = KEY
    settings.cache_clear()
    with tempfile.TemporaryDirectory(prefix="farm-api-") as folder, ExitStack() as stack:
        # its home is closed to the sandboxes' user, who must pass through the folder to reach the scratch next to it
        Path(folder).chmod(0o755)
        home, scratch = Path(folder) / "home", Path(folder) / "scratch"
        options_of = Settings(home=home, scratch=scratch, broker_url="", sandbox="namespace")
        here = stack.enter_context(Embedded(options_of, node_options=NODE_OPTIONS, flower=False))
        url, _ = stack.enter_context(api_process(here.home, "swe-rex"))
        clients = {"http": stack.enter_context(farm.connect(url)), "database": stack.enter_context(farm.connect(home))}
        batch_id = clients["database"].submit({"instances": [NOOP], "n_samples": _STREAMED})
        clients["database"].wait(batch_id, 600)
        with clients["database"].sandboxes.start({"image": "host"}) as lent:
            _compare(report, clients, batch_id, lent.sandbox_id, n, n_turns)
            _compare_shells(report, url, lent, n, n_turns)
    n_requests, n_rounds = (100, 2) if result.quick else (500, 6)
    for name in LOADS:
        measure(report, name, n_requests, n_rounds)
    report.show(result.json)


def _compare(report: Report, clients: Mapping[str, Farm], batch_id: str, sandbox_id: str, n: int, n_turns: int) -> None:
    verbs: dict[str, tuple[Callable[[Farm], object], int]] = {
        "submit": (lambda client: client.submit({"instances": [NOOP]}), n),
        "status": (lambda client: client.status(batch_id), n),
        # each shell takes one call at a time, so each command is separate
        "tool": (lambda client: LentHandle(client.sandboxes, sandbox_id).exec("true"), n),
        "stream": (lambda client: list(client.stream(batch_id, cursor=0)), n // 4),
    }
    for verb, (call, n_calls) in verbs.items():
        times: dict[str, list[float]] = {way: [] for way in clients}
        rates: dict[str, float] = dict.fromkeys(clients, 0.0)
        for _ in range(n_turns):
            for way, client in clients.items():
                began = time.perf_counter()
                times[way] += _timed(client, call, n_calls)
                rates[way] += n_calls / (time.perf_counter() - began) / n_turns
        size = {"rollouts": float(_STREAMED)} if verb == "stream" else {}
        for way in clients:
            report.times(f"{verb}_{way}", times[way], requests_per_s=rates[way], **size)


def _compare_shells(report: Report, url: str, lent: LentHandle, n: int, n_turns: int) -> None:
    """Run `echo hi` in a shell per thread, both ways in turns."""
    shells: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(THREADS):
        lent.shell("true", f"shell-{number}")
        shells.put(f"shell-{number}")
    bodies: dict[str, tuple[str, dict[str, object]]] = {
        "shell": (f"{url}/v1/sandboxes/{lent.sandbox_id}/shell", {"command": "echo hi"}),
        "swe_rex": (
            f"{url}/swe-rex/{lent.sandbox_id}/run_in_session",
            {"command": "echo hi", "timeout": 60, "action_type": "bash"},
        ),
    }
    times: dict[str, list[float]] = {way: [] for way in bodies}
    with httpx2.Client(headers={"x-api-key": KEY}, timeout=60) as http:

        def run(way: str) -> None:
            shell = shells.get()
            place, body = bodies[way]
            http.post(place, json={**body, "session": shell}).raise_for_status()
            shells.put(shell)

        for _ in range(n_turns):
            for way in bodies:
                times[way] += _timed(way, run, n)
    for way in bodies:
        report.times(f"{way}_command_http", times[way])


def _timed(client: Client, call: Callable[[Client], object], n: int) -> list[float]:
    def one(number: int) -> float:
        began = time.perf_counter()
        call(client)
        return time.perf_counter() - began

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(one, range(n)))


if __name__ == "__main__":
    main()
