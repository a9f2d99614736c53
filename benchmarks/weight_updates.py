"""Weight updates of a real vLLM with some 30 calls in flight: the time of each mode, and the versions of tokens.

Rollouts of several turns, in sandboxes with a bash tool, run all the time. Meanwhile two sets of weights alternate,
with ten updates in each mode (`drain`, `keep`, `abort`). In the same run, before the farm knows the engine, the same
orders are sent to the server directly with nothing in flight: pause, reload, name, resume.

Afterwards the log-probability of every sampled token is recomputed with the weights that it names, and calls and tokens
are counted on both sides. Needs the environment of `make train`:
`python -m benchmarks.weight_updates --python .farm/vllm/.venv/bin/python`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

import farm
from examples.training.file_chains import DATA_SOURCE, file_chains
from examples.training.training_farm import cloned_policy, trainer_variables, training_farm
from examples.training.turn_text import CONTEXT_TOKENS
from examples.training.vllm_server import vllm_server
from farm.adapters.arrays import arrays
from farm.client.weight_update import MODES
from farm.records.engine import PauseMode
from farm.records.rollout import Rollout
from farm.records.trajectory import ModelCall
from farm.settings import Settings, settings
from testkit.report import Report
from testkit.scratch_folder import conditions, scratch

N_RUN = 48
"""Rollouts that run on the node at a time; some are in tool calls."""
N_CALLS = 30
_GROUPS, _SAMPLES = 16, 4
_MAX_GAP = 1e-4
"""Rounding of float32, with a margin; different weights give gaps of tenths."""
_BUSY_S, _END_S = 120.0, 300.0
_POLL_S = 0.05
_PHASE_S = 0.2
_VLLM_MODES: dict[PauseMode, str] = {"drain": "wait", "keep": "keep", "abort": "abort"}
_COUNTERS = {
    "sampled": "vllm:generation_tokens_total",
    "running": "vllm:num_requests_running",
    "answered": "vllm:request_success_total",
}


@dataclass(frozen=True, slots=True)
class Update:
    """One update, in s: its total time, and its parts.

    `silent_s` is the longest time without a sampled token around it.

    `began_at` is wall-clock time, like those of recorded calls.
    """

    version: int
    whole_s: float
    pause_s: float
    load_s: float
    resume_s: float
    n_in_flight: int
    silent_s: float
    began_at: float


@dataclass(slots=True)
class ModeRun:
    """The updates in one mode, and the rollouts during them."""

    updates: list[Update] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    n_submitted: int = 0
    n_violations: int = 0
    counted: dict[str, float] = field(default_factory=dict)


class DirectServer:
    """The engine, called directly instead of through the farm."""

    def __init__(self, url: str, weights: Sequence[Path]) -> None:
        self.url = url
        self._weights = weights
        self._http = httpx2.Client(base_url=url, timeout=120)

    def load(self, version: int) -> None:
        """Reload the weights of a version, as a trainer does between pause and resume."""
        path = str(self._weights[version % 2])
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self.post("/reset_prefix_cache?reset_running_requests=true")

    def post(self, path: str, body: object = None) -> None:
        self._http.post(path, json=body or {}).raise_for_status()

    def counters(self) -> dict[str, float]:
        lines = self._http.get("/metrics").text.splitlines()
        return {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith((f"{metric}{{", f"{metric} ")))
            for name, metric in _COUNTERS.items()
        }


def main() -> None:
    options = _options()
    home = settings().home.absolute()
    policy = cloned_policy(options.python, home / "training" / "benchmark-policy")
    report = Report(f"weight updates of vLLM on a CPU, {N_CALLS} calls in flight ({conditions()})")
    with scratch() as place, tempfile.TemporaryDirectory(prefix="farm-benchmark-") as name, ExitStack() as stack:
        folder = Path(name)
        weights = (policy, folder / "other")
        in_vllm(options.python, "shift", *weights)
        url = stack.enter_context(vllm_server(options.python, policy, CONTEXT_TOKENS, folder / "vllm.log"))
        server = DirectServer(url, weights)
        by_hand = {mode: [idle_update(server, mode, number) for number in range(options.updates)] for mode in MODES}
        own = Settings(home=folder / "home", scratch=place, store_url="", broker_url="")
        here = stack.enter_context(training_farm(own, url, ("--run", str(N_RUN))))
        client = stack.enter_context(farm.connect(here.home))
        version = 2
        for mode in MODES:
            with client.weight_update(version, mode="drain"):
                server.load(version)
            mode_run = run_mode(client, server, mode, version, options)
            version += options.updates
            tell_times(report, mode, mode_run, by_hand[mode])
            tell_tokens(report, mode, mode_run, gaps(options.python, weights, mode_run, folder / f"{mode}.npz"))
            version += 1
    report.show(options.json)
    if any(not row.get("reached", True) for row in report.rows.values()):
        sys.exit(1)


def idle_update(server: DirectServer, mode: PauseMode, number: int) -> tuple[float, float]:
    """Update the server directly, with nothing in flight; return the seconds, and those without the reload."""
    began = time.perf_counter()
    server.post(f"/pause?mode={_VLLM_MODES[mode]}")
    paused = time.perf_counter()
    server.load(number + 1)
    loaded = time.perf_counter()
    server.post("/update_weight_version", {"new_version": "0"})
    server.post("/resume")
    ended = time.perf_counter()
    return ended - began, paused - began + ended - loaded


def run_mode(
    client: farm.Farm, server: DirectServer, mode: PauseMode, version: int, options: argparse.Namespace
) -> ModeRun:
    """Keep rollouts in flight during the updates; the engine has `version` at first."""
    mode_run, before = ModeRun(), server.counters()
    batch_ids: list[str] = []
    for number in range(version + 1, version + options.updates + 1):
        busy(client, server, batch_ids)
        # not always at the beginning of calls
        time.sleep(number % 5 * _PHASE_S)
        n_in_flight = busy(client, server, batch_ids)
        mode_run.updates.append(update(client, server, mode, number, n_in_flight))
    mode_run.rollouts = [each for batch_id in batch_ids for each in client.collect(batch_id, timeout_s=_END_S)]
    after = server.counters()
    mode_run.counted = {name: after[name] - before[name] for name in ("sampled", "answered")}
    mode_run.n_submitted = len(batch_ids) * _GROUPS * _SAMPLES
    mode_run.n_violations = sum(len(client.violations(batch_id)) for batch_id in batch_ids)
    mode_run.calls = [call for each in mode_run.rollouts for call in client.calls(each.rollout_id)]
    return mode_run


def busy(client: farm.Farm, server: DirectServer, batch_ids: list[str]) -> int:
    """Wait until enough calls run on the engine, and submit whenever few rollouts are left; return their number."""
    deadline = time.monotonic() + _BUSY_S
    while (n := server.counters()["running"]) < N_CALLS:
        statuses = [client.status(batch_id) for batch_id in batch_ids[-2:]]
        if sum(each.n_rollouts - each.n_finished for each in statuses) < 2 * N_RUN:
            batch_ids.append(submit(client, len(batch_ids)))
        if time.monotonic() > deadline:
            raise TimeoutError(f"{n:.0f} calls run on the engine after {_BUSY_S:g} s, not {N_CALLS}")
        time.sleep(_POLL_S)
    return int(n)


def submit(client: farm.Farm, number: int) -> str:
    """Submit rollouts of up to three turns, with answers long enough for an update during their sampling."""
    request = farm.BatchRequest(
        instances=tuple(
            farm.Instance(data_source=DATA_SOURCE, fields=chain.fields) for chain in file_chains(0, number, _GROUPS)
        ),
        n_samples=_SAMPLES,
        sampling=farm.SamplingParams(temperature=1.0, min_tokens=100, max_tokens=120),
        limits=farm.Limits(max_turns=3, max_observation_chars=20),
        sandbox="namespace",
    )
    return client.submit(request)


def update(client: farm.Farm, server: DirectServer, mode: PauseMode, version: int, n_in_flight: int) -> Update:
    """Update the weights during the calls in flight."""
    with silences(server) as longest:
        began, began_at = time.perf_counter(), time.time()
        with client.weight_update(version, mode=mode):
            paused = time.perf_counter()
            server.load(version)
            loaded = time.perf_counter()
        ended = time.perf_counter()
    parts = (ended - began, paused - began, loaded - paused, ended - loaded)
    return Update(version, *parts, n_in_flight, longest[0], began_at)


@contextmanager
def silences(server: DirectServer) -> Iterator[list[float]]:
    """Poll the engine's tokens while the block runs, and until there are more; yields the longest time without."""
    longest, over = [0.0], threading.Event()

    def poll_counters() -> None:
        last, since = server.counters()["sampled"], time.perf_counter()
        while True:
            n, now = server.counters()["sampled"], time.perf_counter()
            longest[0] = max(longest[0], now - since)
            if n > last:
                last, since = n, now
                if over.is_set():
                    return
            time.sleep(_POLL_S)

    thread = threading.Thread(target=poll_counters, daemon=True)
    thread.start()
    yield longest
    over.set()
    thread.join(_BUSY_S)


def gaps(python: Path, weights: Sequence[Path], mode_run: ModeRun, file: Path) -> dict[str, float]:
    """Recompute the log-probabilities of all sampled tokens; see `benchmarks/token_weights.py`."""
    made = arrays(mode_run.rollouts).as_dict()
    numbers: dict[str, Any] = {name: value for name, value in made.items() if value.dtype.kind in "iuf"}
    np.savez(file, **numbers)
    result: dict[str, float] = json.loads(in_vllm(python, "judge", *weights, file))
    return result


def in_vllm(python: Path, *words: object) -> str:
    command = [str(python), "-m", "benchmarks.token_weights", *map(str, words)]
    return subprocess.run(command, env=trainer_variables(), check=True, stdout=subprocess.PIPE, text=True).stdout


def tell_times(report: Report, mode: PauseMode, mode_run: ModeRun, by_hand: Sequence[tuple[float, float]]) -> None:
    updates = mode_run.updates
    raw, raw_orders = (statistics.median(each[i] for each in by_hand) for i in (0, 1))
    whole = statistics.median(each.whole_s for each in updates)
    report.add(
        f"{mode}: whole update, no call taken",
        whole,
        "s",
        worst=max(each.whole_s for each in updates),
        by_hand_and_idle=raw,
        ratio=whole / raw,
        calls_in_flight=statistics.median(each.n_in_flight for each in updates),
    )
    ends = [last_end(each, mode_run.calls) - each.began_at for each in updates]
    late = [each.pause_s - end for each, end in zip(updates, ends, strict=True)]
    drained = {"last_call_ends_after": statistics.median(ends), "and_then": statistics.median(late)}
    report.add(
        f"{mode}: of it the pause",
        statistics.median(each.pause_s for each in updates),
        "s",
        worst=max(each.pause_s for each in updates),
        **(drained if mode == "drain" else {}),
    )
    report.add(f"{mode}: the reload", statistics.median(each.load_s for each in updates), "s", idle=raw - raw_orders)
    resume = statistics.median(each.resume_s for each in updates)
    report.add(f"{mode}: naming and resume", resume, "s", pause_and_resume_by_hand=raw_orders)
    silent = [each.silent_s for each in updates]
    report.add(f"{mode}: no token sampled", statistics.median(silent), "s", worst=max(silent))


def last_end(one: Update, calls: Sequence[ModelCall]) -> float:
    """Return when the last call ended that was in flight when an update began."""
    ends = (call.started_at + call.latency_s for call in calls if call.started_at < one.began_at)
    paused = one.began_at + one.pause_s
    return max((end for end in ends if one.began_at < end <= paused), default=one.began_at)


def tell_tokens(report: Report, mode: PauseMode, mode_run: ModeRun, gap: dict[str, float]) -> None:
    n_tokens = sum(call.n_response_tokens for call in mode_run.calls)
    report.add(
        f"{mode}: largest gap of a log-probability",
        gap["largest"],
        "",
        at_most=_MAX_GAP,
        median_under_the_other_weights=gap["other_median"],
        tokens=gap["n_tokens"],
    )
    broken = sum(not each.trainable for each in mode_run.rollouts)
    again = sum(each.attempt != 1 for each in mode_run.rollouts)
    lost = mode_run.n_submitted - len({each.rollout_id for each in mode_run.rollouts})
    report.add(
        f"{mode}: rollouts lost, broken or run again",
        lost + broken + again + mode_run.n_violations,
        "",
        at_most=0,
        of=len(mode_run.rollouts),
    )
    report.add(
        f"{mode}: calls outside the versions that were served, or out of order",
        sum(not agrees(call, mode_run.updates) for call in mode_run.calls),
        "",
        at_most=0,
        of=len(mode_run.calls),
        crossed_an_update=sum(len(call.versions) > 1 for call in mode_run.calls),
    )
    report.add(
        f"{mode}: tokens that the engine sampled and no call has",
        mode_run.counted["sampled"] - n_tokens,
        "",
        of=n_tokens,
        requests=mode_run.counted["answered"],
        calls=len(mode_run.calls),
    )


def agrees(call: ModelCall, updates: Sequence[Update]) -> bool:
    """Return whether each token of a call names one version, in ascending order, that was served while it ran."""
    end_at = call.started_at + call.latency_s
    first = updates[0].version - 1
    oldest = max([first, *(each.version for each in updates if each.began_at + each.whole_s <= call.started_at)])
    newest = max([first, *(each.version for each in updates if each.began_at <= end_at)])
    versions = [int(span.version) for span in call.versions]
    ends = [0, *(span.end for span in call.versions)]
    covered = [span.start for span in call.versions] == ends[:-1] and ends[-1] == call.n_response_tokens
    return covered and versions == sorted(versions) and all(oldest <= each <= newest for each in versions)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the Python that has torch and vLLM")
    parser.add_argument("--updates", type=int, default=10, help="updates in each mode")
    parser.add_argument("--quick", action="store_const", dest="updates", const=2, help="fewer updates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
