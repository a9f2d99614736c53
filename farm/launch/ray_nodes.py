"""Nodes of a farm on a Ray cluster: an actor on each of several Ray nodes keeps a `farm node --at DIR` running.

The actors end with the driver that created them, however it ends, and their nodes release their rollouts. If a Ray node
is lost, Ray restarts its actor where the placement group finds room.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from farm.embedded.child_process import ChildProcess
from farm.errors import FarmError, NotAllowed
from farm.extras import not_installed

_PAUSE_S = (5.0, 300.0)
_STEADY_S = 60.0
"""A node that ran longer than this is restarted at once when it ends, in seconds."""
_HAND_BACK_S = 25.0
"""Seconds beyond its grace for releasing rollouts and cleaning up on a busy machine."""
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node as its actor sees it; `status` is its exit status once it has ended and is to be restarted."""

    name: str
    pid: int
    status: int | None
    log: str


class NodeKeeper:
    """The actor: `keep` starts its node and restarts it; `stop` lets it release its rollouts."""

    def __init__(self, shared: str, options: Sequence[str], settings: Mapping[str, str], grace_s: float) -> None:
        ray = import_module("ray")
        self._name = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
        self._log = Path(shared) / "logs" / f"farm-ray-{self._name}.log"
        node = [sys.executable, "-m", "farm.cli.main", "node", "--at", shared, *options, "--grace", f"{grace_s:g}"]
        self._command = [sys.executable, "-m", "farm.launch.ray_watch", *node]
        self._env = os.environ | dict(settings) | {"FARM_NODE": self._name}
        self._grace_s = grace_s
        self._process: ChildProcess | None = None
        self._stopped = False
        self._n_short = 0
        self._began = self._not_before = 0.0

    def keep(self) -> RayNode:
        """Return the node, starting it unless it runs; one that ends early is restarted ever later."""
        status = None
        if self._process is not None and not self._process.running:
            status = self._process.process.returncode
            now = time.monotonic()
            self._n_short = self._n_short + 1 if now - self._began < _STEADY_S else 0
            pause_s = min(_PAUSE_S[0] * 2 ** min(self._n_short - 1, 16), _PAUSE_S[1]) if self._n_short else 0.0
            self._not_before, self._process = now + pause_s, None
        if self._process is None and not self._stopped and time.monotonic() >= self._not_before:
            self._began = time.monotonic()
            # from the actor's main thread, which lives as long as the actor
            self._process = ChildProcess(self._command, env=self._env, log=self._log)
        return RayNode(self._name, 0 if self._process is None else self._process.pid, status, str(self._log))

    def stop(self) -> None:
        """End the node, which releases its rollouts."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()
            self._process.end(self._grace_s + _HAND_BACK_S)


class RayNodes:
    """`with RayNodes(shared, 4) as nodes`, in a process that is connected to Ray; call `look` regularly.

    Each takes `cpus` of a separate Ray node (a placement group, STRICT_SPREAD). Raises NotInstalled without Ray.
    """

    def __init__(
        self,
        shared: str | Path,
        n: int,
        *,
        cpus: float = 1.0,
        options: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        grace_s: float = 15.0,
    ) -> None:
        self._ray = loaded_ray()
        self._shared = str(Path(shared).absolute())
        self._n = n
        self._cpus = cpus
        self._arguments = (self._shared, tuple(options), dict(settings or {}), grace_s)
        self._grace_s = grace_s
        self._group: Any = None
        self._keepers: list[Any] = []
        self._pending: dict[int, Any] = {}
        self._known: dict[int, RayNode] = {}

    def __enter__(self) -> Self:
        util = import_module("ray.util")
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        self._group = util.placement_group([{"CPU": self._cpus}] * self._n, strategy="STRICT_SPREAD")
        actor = self._ray.remote(NodeKeeper)
        for n in range(self._n):
            options = {"num_cpus": self._cpus, "max_restarts": -1, "max_task_retries": -1}
            scheduling = strategy(self._group, placement_group_bundle_index=n)
            self._keepers.append(actor.options(**options, scheduling_strategy=scheduling).remote(*self._arguments))
        return self

    def look(self) -> list[RayNode]:
        """Return the nodes that have a Ray node, restarting ended ones; lost ones are left out."""
        for n, keeper in enumerate(self._keepers):
            if n not in self._pending:
                self._pending[n] = keeper.keep.remote()
        done, _ = self._ray.wait(list(self._pending.values()), num_returns=len(self._pending), timeout=_ANSWER_S)
        for n, pending in list(self._pending.items()):
            if pending not in done:
                # it waits for a Ray node
                self._known.pop(n, None)
                continue
            del self._pending[n]
            try:
                self._known[n] = self._ray.get(pending)
            except self._ray.exceptions.RayError as error:
                raise FarmError(f"Ray has given up a node of the farm: {error}") from error
        return list(self._known.values())

    def __exit__(self, *error: object) -> None:
        stopping = [keeper.stop.remote() for n, keeper in enumerate(self._keepers) if n in self._known]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=self._grace_s + _HAND_BACK_S + _ANSWER_S)
        for keeper in self._keepers:
            self._ray.kill(keeper)
        if self._group is not None:
            import_module("ray.util").remove_placement_group(self._group)


def connected_ray(address: str) -> Any:
    """Return Ray, connected to the cluster at an address, as for `ray.init`. Raises NotInstalled, NotAllowed."""
    ray = loaded_ray()
    named = os.environ.get("RAY_ADDRESS") or "auto" if address == "auto" else address
    where = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", named)
    try:
        if where is not None:
            # Ray itself would retry for minutes
            socket.create_connection((where[1], int(where[2])), _ANSWER_S).close()
        ray.init(address=address, log_to_driver=False)
    except (OSError, OverflowError, ValueError) as error:
        raise NotAllowed(f"no Ray cluster answers at {named}: {str(error).splitlines()[0]}") from None
    return ray


def loaded_ray() -> Any:
    """Return Ray, which is imported only where it is used. Raises NotInstalled."""
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise not_installed("a farm on Ray", "ray", extra="ray") from None
