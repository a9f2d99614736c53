"""Time from the cancel of a batch until its calls are closed and its sandboxes are removed.

Two nodes as `farm node` runs them by default, on one Postgres and one Redis. Most rollouts of the batch are running,
each in its own sandbox and in a call to the scripted engine that never ends; the others are queued for an agent, with
their sandboxes started. The client can reach the workers' Redis, or only the database. A call counts as closed when
the engine has noticed it, a sandbox as removed when its folder is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import farm
from farm.embedded.child_process import ChildProcess
from farm.embedded.own_redis import start_redis
from farm.records.rollout import Stage, State
from farm.store import migrations
from farm.store.database import Store
from testkit.postgres import postgres_server
from testkit.report import Report, options
from workers.testing.engine import ScriptedEngine
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

NODES = ("one", "two")
N_INIT, N_RUN, N_EVAL = 4, 64, 8
N_ACTIVE = len(NODES) * N_RUN
N_QUEUED = len(NODES) * (N_INIT + N_EVAL)
AT_MOST_MS = 1000.0
"""The promised limit for each percentile, in milliseconds."""
_ANSWER = "answer"
_SCRIPT = Script(
    [ScriptedProblem(match=_ANSWER, branches=(Branch(name="answer", turns=(ScriptedTurn(content=_ANSWER),)),))]
)
_PROBLEM = {
    "data_source": "code",
    "fields": {"task_id": "one", "prompt": f"def {_ANSWER}():\n", "entry_point": _ANSWER, "test": "def check(f): ..."},
}
_LIMITS = {"init_s": 600, "run_s": 3600}
_NEVER_S = 3600.0
_DEADLINE_S = 180.0
_POLL_S = 0.005


@dataclass(slots=True)
class Falling:
    """A count falling from `n` to 0; `falls` are the seconds after which it was seen one lower."""

    n: int
    falls: list[float] = field(default_factory=list)

    def note(self, left: int, at_s: float) -> None:
        self.falls += [at_s] * (self.n - len(self.falls) - left)


def main() -> None:
    result = options(__doc__)
    report = Report(f"from a cancel of {N_ACTIVE} running rollouts, and {N_QUEUED} that are queued for an agent")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="farm-cancel-", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        store_url = stack.enter_context(postgres_server())
        store = Store(store_url)
        migrations.migrate(store)
        store.close()
        redis, broker_url = start_redis(folder / "redis", folder / "redis.log")
        stack.callback(redis.end, 5.0)
        stack.callback(redis.terminate)
        engine = ScriptedEngine(_SCRIPT)
        url = stack.enter_context(serving(engine.app()))
        clients = {
            "redis": stack.enter_context(farm.connect(store_url, broker_url=broker_url)),
            "database_alone": stack.enter_context(farm.connect(store_url, broker_url="")),
        }
        clients["redis"].add_engine(f"{url}/v1")
        for node in NODES:
            stack.enter_context(_node(folder, node, store_url, broker_url))
        clients["redis"].collect(clients["redis"].submit({"instances": [_PROBLEM]}), timeout_s=_DEADLINE_S)
        # the farm has probed the engine and uses it; from now on, no call there ends
        engine.scheduler.speed = replace(engine.scheduler.speed, latency_s=_NEVER_S)
        for _ in range(1 if result.quick else 5):
            for kind, client in clients.items():
                for what, falls in cancelled(client, engine, folder).items():
                    times.setdefault(f"{what}, {kind}", []).extend(falls)
    for row, falls in times.items():
        report.times(row, falls, p99_at_most_ms=AT_MOST_MS)
    report.show(result.json)


def cancelled(client: farm.Farm, engine: ScriptedEngine, folder: Path) -> dict[str, list[float]]:
    """Return the seconds until calls were closed, and until the sandboxes of running and queued rollouts were gone."""
    batch_id = client.submit({"instances": [_PROBLEM] * (N_ACTIVE + N_QUEUED), "limits": _LIMITS})
    _until(
        lambda: engine.n_running == N_ACTIVE and _all_wait(client, batch_id),
        f"all of {batch_id} run or are queued",
    )
    queued = {f"{each.rollout_id}.{each.attempt}" for each in client.rollouts(batch_id) if each.state == State.QUEUED}
    calls, sandboxes, of_queued = Falling(N_ACTIVE), Falling(N_ACTIVE), Falling(N_QUEUED)

    def all_gone() -> bool:
        left = _sandboxes(folder)
        n_queued = len(queued.intersection(left))
        at_s = time.monotonic() - cancelled_at
        calls.note(engine.n_running, at_s)
        sandboxes.note(len(left) - n_queued, at_s)
        of_queued.note(n_queued, at_s)
        return not left and not engine.n_running

    cancelled_at = time.monotonic()
    cancelling = threading.Thread(target=client.cancel, args=(batch_id,))
    cancelling.start()
    _until(all_gone, "all are gone", _POLL_S)
    cancelling.join()
    return {"call_closed": calls.falls, "sandbox_gone": sandboxes.falls, "queued_sandbox_gone": of_queued.falls}


def _all_wait(client: farm.Farm, batch_id: str) -> bool:
    """Return whether every rollout that is not running has been submitted and is queued."""
    return client.status(batch_id).stages[Stage.RUN][State.QUEUED] == N_QUEUED


def _sandboxes(folder: Path) -> list[str]:
    """Return the names of the sandboxes outside the warm pool."""
    return [each.name for each in folder.glob("scratch/*/sandboxes/[!.]*")]


@contextmanager
def _node(folder: Path, name: str, store_url: str, broker_url: str) -> Iterator[None]:
    env = os.environ | {"FARM_NODE": name, "FARM_STORE_URL": store_url, "FARM_BROKER_URL": broker_url}
    env |= {"FARM_HOME": str(folder / "home"), "FARM_SCRATCH": str(folder / "scratch"), "FARM_SANDBOX": "namespace"}
    slots = ("--init", str(N_INIT), "--run", str(N_RUN), "--eval", str(N_EVAL), "--grace", "0")
    command = [sys.executable, "-m", "workers.node", *slots]
    child = ChildProcess(command, env=env, log=folder / f"{name}.log", on_parent_death=signal.SIGTERM)
    try:
        yield
    finally:
        child.terminate()
        child.end(30.0)


def _until(reached: Callable[[], bool], what: str, pause_s: float = 0.2) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the farm does not do what is expected: {what}")
        time.sleep(pause_s)


if __name__ == "__main__":
    main()
