"""20,000 rollouts at once: submission rate, cost while they are queued, and delay of other batches.

Every figure is compared with the same one with a short queue, in the same run, on both databases. The rollouts are
empty: no sandbox, no LLM.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import farm
from farm.embedded.embedded_farm import Embedded
from farm.settings import Settings
from farm.store import migrations, placement
from farm.store.database import Store
from testkit.postgres import postgres_server
from testkit.private_server import Missing
from testkit.processes import cpu_s, forget_peak, named, peak_mb, tree
from testkit.report import Report, options
from workers.testing import plugin_path

NODE_OPTIONS = ("--init", "8", "--run", "64", "--eval", "8")
NOOP = {"data_source": "noop", "fields": {}}
_CLIENT = """
import sys, time, farm
with farm.connect(sys.argv[1], broker_url=sys.argv[2]) as client:
    client.recent(1)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.time()
    ids = [client.submit({"instances": [{"data_source": "noop", "fields": {}}] * 200}) for _ in range(int(sys.argv[3]))]
    print(started, time.time(), *ids, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: `many` rollouts submitted at once, `rated` for the rate, `few` in a small backlog.

    `repeats` and `small` are the numbers of measurements.
    """

    many: int
    rated: int
    few: int
    repeats: int
    small: int
    clients: int


FULL = Sizes(many=20_000, rated=2_000, few=480, repeats=2, small=3, clients=20)
QUICK = Sizes(many=4_000, rated=300, few=200, repeats=1, small=1, clients=4)


def main() -> None:
    result = options(__doc__)
    plugin_path.install()
    sizes = QUICK if result.quick else FULL
    report = Report(f"{sizes.many} rollouts at once")
    with tempfile.TemporaryDirectory(prefix="farm-overload-") as folder, ExitStack() as stack:
        urls = {"sqlite": f"sqlite:///{folder}/farm.db"}
        try:
            urls["postgres"] = stack.enter_context(postgres_server())
        except Missing as missing:
            print(f"no Postgres: {missing}", file=sys.stderr)
        for name, url in urls.items():
            _measure(report, name, Path(folder) / name, url, sizes)
    report.show(result.json)


def _measure(report: Report, name: str, home: Path, url: str, sizes: Sizes) -> None:
    store = Store(url)
    try:
        migrations.migrate(store)
        submitting(report, name, url, sizes)
        rounds(report, name, store, url, sizes)
        settings = Settings(home=home, scratch=home / "scratch", store_url=url, broker_url="", sandbox="namespace")
        with (
            Embedded(settings, node_options=NODE_OPTIONS, flower=False) as here,
            farm.connect(here.store_url, broker_url=here.broker_url) as client,
        ):
            client.wait(client.submit({"instances": [NOOP] * 200}), 60)
            throughput(report, name, client, sizes)
            small_batches(report, name, client, sizes)
            many_clients(report, name, here, client, sizes)
    finally:
        store.close()


def _problems(n: int) -> list[dict[str, Any]]:
    """Return questions as long as those of a coding problem."""
    return [
        {"data_source": "chat", "fields": {"question": f"{index} " + "What does this do? " * 160}} for index in range(n)
    ]


def submitting(report: Report, name: str, url: str, sizes: Sizes) -> None:
    """Measure `submit` from a trainer's call to its return, and the cancel of the same batch."""
    n = sizes.many
    problems = _problems(n // 8)
    with farm.connect(url, broker_url="") as client:
        client.cancel(client.submit({"instances": problems[:1]}))
        taken, cancelled = [], []
        for _ in range(3):
            started = time.perf_counter()
            batch_id = client.submit({"instances": problems, "n_samples": 8})
            taken.append(n / (time.perf_counter() - started))
            started = time.perf_counter()
            client.cancel(batch_id)
            cancelled.append(n / (time.perf_counter() - started))
    report.add(
        f"{name}_submit", statistics.median(taken), "rollouts/s", at_least=2000, cancel=statistics.median(cancelled)
    )


def rounds(report: Report, name: str, store: Store, url: str, sizes: Sizes) -> None:
    """Measure a round of the dispatcher and a status query, with few and with many queued rollouts."""
    with farm.connect(url, broker_url="") as client:
        result: dict[str, dict[str, float]] = {}
        for size, n in (("few", 200), ("many", sizes.many)):
            batch_id = client.submit({"instances": [NOOP] * (n // 8), "n_samples": 8})
            queries: dict[str, Callable[[], object]] = {
                "round": lambda batch_id=batch_id: _round(store, batch_id),  # type: ignore[misc]
                "status": partial(client.status, batch_id),
            }
            for query, ask in queries.items():
                result.setdefault(query, {})[size] = _median_s(ask) * 1000
            client.cancel(batch_id)
        for query, times in result.items():
            report.add(f"{name}_{query}", times["many"], "ms", with_200_waiting=times["few"])


def _round(store: Store, batch_id: str) -> None:
    room = sum(int(part) for part in NODE_OPTIONS[1::2])
    store.read(placement.occupied)
    store.read(partial(placement.waiting, limit=room))
    store.read(partial(placement.next_of, batch_id=batch_id, limit=room))


def _median_s(ask: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        ask()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def throughput(report: Report, name: str, client: farm.Farm, sizes: Sizes) -> None:
    """Measure the rate of the farm, its CPU time and its memory, with many waiting rollouts and with few, in turns."""
    processes = tree(os.getpid())
    supervisor = named(processes, "-m workers.node")
    watched = {"client": os.getpid(), "supervisor": supervisor}
    watched |= {stage: named(processes, f"-n {stage}@") for stage in ("init", "run", "eval")}
    result: dict[str, list[_BatchRun]] = {"few": [], "many": []}
    for _ in range(sizes.repeats):
        result["few"].append(_run_batch(client, sizes.few, sizes.few, watched))
        result["many"].append(_run_batch(client, sizes.many, sizes.rated, watched))
    few, many = (
        {key: _medians(result[size], key) for key in ("rate", "cpu_ms", "client_ms")} for size in ("few", "many")
    )
    report.add(f"{name}_rate", many["rate"], "rollouts/s", at_least=0.9 * few["rate"], with_few=few["rate"])
    report.add(f"{name}_supervisor_cpu_per_rollout", many["cpu_ms"], "ms", with_few=few["cpu_ms"])
    report.add(f"{name}_cpu_of_a_streaming_client", many["client_ms"], "ms", with_few=few["client_ms"])
    for part in watched:
        # processes in the first round of many have never had many before
        with_few = result["few"][0].peaks_mb[part]
        report.add(
            f"{name}_peak_memory_{part}", max(each.peaks_mb[part] for each in result["many"]), "MB", with_few=with_few
        )


@dataclass(frozen=True, slots=True)
class _BatchRun:
    rate: float
    cpu_ms: float
    client_ms: float
    peaks_mb: dict[str, float]


def _medians(runs: Sequence[_BatchRun], key: str) -> float:
    return statistics.median([float(getattr(each, key)) for each in runs])


def _run_batch(client: farm.Farm, n: int, rated: int, watched: dict[str, int]) -> _BatchRun:
    """Submit n, stream the first `rated` as a trainer would, cancel the rest."""
    for pid in watched.values():
        forget_peak(pid)
    supervisor = [watched["supervisor"]]
    me = [os.getpid()]
    batch_id = client.submit({"instances": [NOOP] * (n // 8), "n_samples": 8})
    before = (cpu_s(supervisor), cpu_s(me))
    started = time.perf_counter()
    for count, rollout in enumerate(client.stream(batch_id, timeout_s=60), 1):
        assert rollout.reward is not None
        if count == rated:
            break
    elapsed_s = time.perf_counter() - started
    cpu_ms, client_ms = (
        (now - then) / rated * 1000 for now, then in zip((cpu_s(supervisor), cpu_s(me)), before, strict=True)
    )
    peaks = {part: peak_mb(pid) for part, pid in watched.items()}
    client.cancel(batch_id)
    return _BatchRun(rated / elapsed_s, cpu_ms, client_ms, peaks)


def small_batches(report: Report, name: str, client: farm.Farm, sizes: Sizes) -> None:
    """Measure a batch of 64 on an idle farm, and next to a huge one of equal and of lower priority."""
    times: dict[str, float] = {"by itself": _small(client, 0, sizes.small)}
    with _crowded(client, sizes.many):
        times["equal"] = _small(client, 0, sizes.small)
        times["higher"] = _small(client, 1, sizes.small)
    report.add(
        f"{name}_64_next_to_many", times["equal"], "s", by_itself=times["by itself"], of_higher_priority=times["higher"]
    )


@contextmanager
def _crowded(client: farm.Farm, n: int) -> Iterator[None]:
    batch_id = client.submit({"instances": [NOOP] * (n // 8), "n_samples": 8})
    try:
        while client.status(batch_id).n_finished < 100:
            time.sleep(0.05)
        yield
    finally:
        client.cancel(batch_id)


def _small(client: farm.Farm, priority: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        client.wait(client.submit({"instances": [NOOP] * 64, "priority": priority}), 120)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def many_clients(report: Report, name: str, here: Embedded, client: farm.Farm, sizes: Sizes) -> None:
    """Measure many processes that submit batches of 200 at once, and how evenly these progress."""
    each = 5
    command = [sys.executable, "-c", _CLIENT, here.store_url, here.broker_url, str(each)]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(sizes.clients)
        ]
        for process in clients:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in clients:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        result = [process.communicate()[0].split() for process in clients]
    ids = [batch_id for _, _, *of_one in result for batch_id in of_one]
    assert len(ids) == each * sizes.clients, "every submit was taken"
    took_s = max(float(words[1]) for words in result) - min(float(words[0]) for words in result)
    before = _ended(client, ids)
    while sum(after := _ended(client, ids)) - sum(before) < 10 * len(ids):
        time.sleep(0.05)
    meanwhile = [now - then for now, then in zip(after, before, strict=True)]
    for batch_id in ids:
        client.cancel(batch_id)
    report.add(f"{name}_submit_by_{sizes.clients}_clients", 200 * len(ids) / took_s, "rollouts/s", at_least=2000)
    spread = max(meanwhile) - min(meanwhile)
    report.add(f"{name}_unevenness_of_{len(ids)}_batches", spread, "rollouts", mean=statistics.mean(meanwhile))


def _ended(client: farm.Farm, ids: Sequence[str]) -> list[int]:
    return [client.status(batch_id).n_finished for batch_id in ids]


if __name__ == "__main__":
    main()
