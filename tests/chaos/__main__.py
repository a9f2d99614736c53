"""`python -m tests.chaos --seed S --minutes M [--json FILE]`: chaos tests of a whole farm.

Starts a whole farm (database, broker, nodes, scripted engines, trainers) in a temporary folder, keeps it busy with
problems whose rewards are known, and kills, freezes, disconnects and restarts its parts by a seeded plan. Then
everything is restored, every batch must end, and the promises are checked one by one: exactly one result for each
rollout, nothing lost, nothing doubled, no broken rollout scored, nothing left behind. With exit code 1 it names the
broken promises.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from testkit.leftovers import Leftovers
from testkit.scratch_folder import conditions, scratch
from tests.chaos import report
from tests.chaos.disk import is_disk
from tests.chaos.faults import deck
from tests.chaos.parts import Parts, Size
from tests.chaos.plan import digest, plan
from tests.chaos.run import Run
from tests.services.farms import farm_folder, paths_below
from workers.testing import plugin_path

_PATIENCE_S = 20.0


def main() -> None:
    result = _options()
    plugin_path.install()
    signal.signal(signal.SIGTERM, _interrupt)
    with scratch(), farm_folder() as folder:
        good = False
        try:
            good = chaos(result, folder)
        except KeyboardInterrupt:
            sys.exit("stopped before the first rollout; nothing is left running")
        finally:
            if result.logs is not None or not good:
                logs = result.logs or Path(tempfile.mkdtemp(prefix=f"farm-chaos-{result.seed}-"))
                _keep(folder, logs)
                print(f"the logs of all parts are kept in {logs}", file=sys.stderr)
    sys.exit(0 if good else 1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def chaos(options: argparse.Namespace, folder: Path) -> bool:
    """Run once in a folder; return whether every promise was kept."""
    events = plan(options.seed, options.minutes, options.pace, deck(options.store, options.broker))[: options.faults]
    about = {"seed": options.seed, "minutes": options.minutes, "plan": digest(events), "faults": len(events)}
    print(", ".join(f"{name} {value}" for name, value in about.items()), conditions(), sep="\n", file=sys.stderr)
    size = Size(
        options.nodes,
        options.engines,
        options.clients,
        options.lease,
        options.latency,
        options.store,
        options.broker,
        options.sandbox,
    )
    before = Leftovers(folder)
    parts = Parts(folder, size, options.seed)
    run = Run(parts, events)
    findings = None
    try:
        parts.start()
        run.warm_up()
        run.inject_faults()
        run.restore()
        run.settle(options.settle)
        run.check()
        findings = report.findings(run)
    finally:
        try:
            parts.stop()
            left = _left(before, folder)
        finally:
            parts.remove_disk()
    if run.interrupted:
        about["interrupted"] = "after its faults so far"
    report.show(
        run, findings, left, about | {"store": size.store, "broker": size.broker, "lease_s": size.lease_s}, options.json
    )
    return report.kept(run.broken, left)


def _keep(folder: Path, logs: Path) -> None:
    """Keep the logs of all parts, and the clients' journals."""
    for name in ("logs", "clients"):
        if not (folder / name).exists():
            continue
        shutil.copytree(folder / name, logs / name, dirs_exist_ok=True)
    for path in folder.glob("*.log"):
        shutil.copy(path, logs)


def _left(before: Leftovers, folder: Path) -> list[str]:
    """Return the new resources, after ended processes had time to release theirs."""
    deadline = time.monotonic() + _PATIENCE_S
    while (result := _left_now(before, folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return result


def _left_now(before: Leftovers, folder: Path) -> list[str]:
    """Return them without descriptors, which belong to this process and not to the farm."""
    kinds = {kind: names for kind, names in before.leftovers().items() if kind != "descriptors"}
    kinds["mounts"] = [line for line in kinds["mounts"] if not is_disk(line)]
    paths = paths_below(folder / "scratch")
    kinds["files"] = [str(path) for path in (folder / "tmp").glob("*")]
    kinds["files"] += [str(path) for path in paths if path.parent.name == "sandboxes" or path.is_socket()]
    return [f"{kind}: {each}" for kind, names in kinds.items() for each in names]


def _options() -> argparse.Namespace:
    usual = Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults strike")
    parser.add_argument("--pace", type=float, default=3.0, metavar="S", help="mean seconds between two faults")
    parser.add_argument("--faults", type=int, help="no more than so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="keep the logs of all parts there; without it they are kept if a promise is broken",
    )
    parser.add_argument(
        "--settle", type=float, default=300.0, metavar="S", help="what all batches get to end afterwards"
    )
    farm = parser.add_argument_group("the farm")
    farm.add_argument("--store", choices=("postgres", "sqlite"), default="postgres")
    farm.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    farm.add_argument("--sandbox", choices=("namespace", "singularity"), default="namespace")
    farm.add_argument("--lease", type=float, default=usual.lease_s, metavar="S", help="of a claim, and of a node")
    farm.add_argument("--nodes", type=int, default=usual.n_nodes)
    farm.add_argument("--engines", type=int, default=usual.n_engines)
    farm.add_argument("--clients", type=int, default=usual.n_clients)
    farm.add_argument("--latency", type=float, default=usual.latency_s, metavar="S", help="of an answer of an engine")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
