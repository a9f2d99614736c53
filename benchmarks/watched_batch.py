"""The cost of the page for a running batch: the same batch without the page, and with the page open in 20 browsers.

Each browser keeps the batch's server-sent events open, as the page does, and loads another view every 10 s. They run in
a separate process on this machine, so their CPU use counts against the page, too; their CPU time is also given
separately. There are two kinds of batches: empty rollouts, which use all processors, and rollouts that wait 1 s for an
engine, which leave some idle. Alone and watched take turns, in both orders, and the cost is the median of the pairs.
Measure on a quiet machine: two runs of one batch differ by more than 2 % where anything else runs.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

import farm
from farm.embedded.embedded_farm import Embedded
from farm.settings import Settings, settings
from farm.web.app import COOKIE
from testkit.processes import cpu_s, named, tree
from testkit.report import Report, options
from workers.testing import plugin_path

KEY = "of-this-benchmark"
NODE_OPTIONS = ("--init", "8", "--run", "64", "--eval", "8")
N_BROWSERS = 20
AIM_PERCENT = 2.0
LOAD_EVERY_S = 10.0
LOADS = {
    "empty": {"data_source": "noop", "fields": {}},
    "waiting": {"data_source": "noop", "fields": {"seconds": 1.0}},
}
VIEWS = ("/batches/{b}/rollouts", "/batches/{b}/failures", "/batches/{b}/figures", "/batches/{b}/selection", "/cluster")
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run of a batch: its seconds, and the CPU seconds of all processes of the farm, and of only its API."""

    took_s: float
    farm_cpu_s: float
    api_cpu_s: float
    browsers_cpu_s: float = 0.0
    n_parts: int = 0


def main() -> None:
    args = options(__doc__)
    plugin_path.install()
    n_pairs, sizes = (2, {"empty": 600, "waiting": 512}) if args.quick else (10, {"empty": 5000, "waiting": 3840})
    report = Report(f"a batch with its page open in {N_BROWSERS} browsers, against the same without it")
    os.environ["FARM_API_KEY"] = KEY
    settings.cache_clear()
    with tempfile.TemporaryDirectory(prefix="farm-watched-") as folder:
        Path(folder).chmod(0o755)
        home, scratch = Path(folder) / "home", Path(folder) / "scratch"
        chosen = Settings(home=home, scratch=scratch, broker_url="", sandbox="namespace")
        with (
            Embedded(chosen, node_options=NODE_OPTIONS, flower=False, api=True) as here,
            farm.connect(here.store_url, broker_url=here.broker_url) as client,
        ):
            for name, instance in LOADS.items():
                watched_run(here, client, instance, 64, 0)
                measure(report, name, here, client, instance, sizes[name], n_pairs)
    report.show(args.json)


def measure(
    report: Report, name: str, here: Embedded, client: farm.Farm, instance: dict[str, Any], n: int, n_pairs: int
) -> None:
    """Run pairs of batches and add their medians to the report."""
    runs: dict[int, list[WatchedRun]] = {0: [], N_BROWSERS: []}
    for pair in range(n_pairs):
        # drift, such as the growth of the database, affects each of the two in turn
        for n_browsers in (0, N_BROWSERS) if pair % 2 == 0 else (N_BROWSERS, 0):
            runs[n_browsers].append(watched_run(here, client, instance, n, n_browsers))
    unwatched, watched = runs[0], runs[N_BROWSERS]
    costs = [100 * (with_page.took_s / plain.took_s - 1) for plain, with_page in zip(unwatched, watched, strict=True)]
    rate = n / statistics.median(run.took_s for run in watched)
    report.add(
        f"{name}: rollouts per second", rate, "1/s", without_page=n / statistics.median(run.took_s for run in unwatched)
    )
    spread = {"least": min(costs), "most": max(costs)}
    report.add(f"{name}: longer by", statistics.median(costs), "%", at_most=AIM_PERCENT, **spread)
    api = statistics.median(100 * run.api_cpu_s / run.took_s for run in watched)
    api_unwatched = statistics.median(100 * run.api_cpu_s / run.took_s for run in unwatched)
    report.add(f"{name}: CPU of the API, of one processor", api, "%", without_page=api_unwatched)
    farm_cpu = statistics.median(run.farm_cpu_s for run in watched)
    farm_unwatched = statistics.median(run.farm_cpu_s for run in unwatched)
    report.add(f"{name}: CPU of the farm, API included", farm_cpu, "s", without_page=farm_unwatched)
    browsers = statistics.median(100 * run.browsers_cpu_s / run.took_s for run in watched)
    parts = statistics.median(run.n_parts for run in watched)
    report.add(f"{name}: CPU of the browsers, of one processor", browsers, "%", parts_that_were_sent=parts)


def watched_run(here: Embedded, client: farm.Farm, instance: dict[str, Any], n: int, n_browsers: int) -> WatchedRun:
    """Run a batch, with some browsers that watch it from submit to end. Raises RuntimeError if they did not."""
    processes = tree(os.getpid())
    api = [named(processes, "farm.cli.main api")]
    with _browsers(here.api_url, n_browsers) as watching:
        before = cpu_s(processes), cpu_s(api), cpu_s(watching.pids)
        started = time.perf_counter()
        batch_id = client.submit({"instances": [instance] * n})
        watching.watch(batch_id)
        status = client.wait(batch_id, 600)
        took_s = time.perf_counter() - started
        farm_cpu_s, api_cpu_s = cpu_s(processes) - before[0], cpu_s(api) - before[1]
        browsers_cpu_s = cpu_s(watching.pids) - before[2]
        n_parts = watching.n_parts()
    if status.n_completed != n:
        raise RuntimeError(f"{status.n_completed} of {n} rollouts were scored")
    return WatchedRun(took_s, farm_cpu_s, api_cpu_s, browsers_cpu_s, n_parts)


class _Watching:
    """The process of the browsers, and the messages to and from it."""

    def __init__(self, url: str, n: int) -> None:
        self._n = n
        self.pids: list[int] = []
        if not n:
            return
        context = multiprocessing.get_context("spawn")
        self._line, line = context.Pipe()
        self._process = context.Process(target=_run_browsers, args=(url, n, line), daemon=True)
        self._process.start()
        if not self._line.poll(_START_S):
            raise RuntimeError(f"the browsers have not signed in after {_START_S:g} s")
        self._line.recv()
        self.pids = [self._process.pid or 0]

    def watch(self, batch_id: str) -> None:
        if self._n:
            self._line.send(batch_id)

    def n_parts(self) -> int:
        """Wait until the streams have ended. Return how many parts were sent to all browsers together."""
        if not self._n:
            return 0
        if not self._line.poll(_START_S):
            raise RuntimeError(f"the streams of a batch have not ended {_START_S:g} s after it")
        counts: list[int] = self._line.recv()
        if len(counts) != self._n or min(counts) < 1:
            raise RuntimeError(f"not every browser saw the batch: parts that each got: {counts}")
        return sum(counts)

    def end(self) -> None:
        if self._n:
            self._process.terminate()
            self._process.join()


@contextmanager
def _browsers(url: str, n: int) -> Iterator[_Watching]:
    made = _Watching(url, n)
    try:
        yield made
    finally:
        made.end()


def _run_browsers(url: str, n: int, line: Any) -> None:
    asyncio.run(_browse(url, n, line))


async def _browse(url: str, n: int, line: Any) -> None:
    limits = httpx2.Limits(max_connections=None)
    headers = {"cookie": f"{COOKIE}={KEY}"}
    async with httpx2.AsyncClient(base_url=f"{url}/web", headers=headers, timeout=60, limits=limits) as client:
        (await client.get("/")).raise_for_status()
        line.send("ready")
        batch_id = await asyncio.to_thread(line.recv)
        # pages opened at the same time would also send their requests at the same time; people do not
        counts = await asyncio.gather(*(_watched(client, batch_id, at / n) for at in range(n)))
    line.send(counts)


async def _watched(client: httpx2.AsyncClient, batch_id: str, after_s: float) -> int:
    """Keep a batch's events open until its end, and load other views meanwhile. Return the number of parts."""
    await asyncio.sleep(after_s)
    (await client.get(f"/batches/{batch_id}")).raise_for_status()
    loads = asyncio.create_task(_load_views(client, batch_id, after_s * LOAD_EVERY_S))
    n_parts = 0
    try:
        async with client.stream("GET", f"/batches/{batch_id}/live") as answer:
            answer.raise_for_status()
            async for words in answer.aiter_lines():
                n_parts += words == "event: part"
    finally:
        loads.cancel()
    if loads.done():
        # it ends early only if a view could not be loaded
        loads.result()
    return n_parts


async def _load_views(client: httpx2.AsyncClient, batch_id: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    for view in itertools.cycle(VIEWS):
        (await client.get(view.format(b=batch_id))).raise_for_status()
        await asyncio.sleep(LOAD_EVERY_S)


if __name__ == "__main__":
    main()
