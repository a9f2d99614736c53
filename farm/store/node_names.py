"""The name of a node, held by one supervisor at a time.

A supervisor holds the name until it releases it or is known to be dead: its process is gone from this machine, or it
has sent no heartbeat for `timeout_s`. Until then its claims are untouched. So a second node of the same name does no
harm: it is refused.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from farm.records.node import Node
from farm.store import borrowed_sandboxes, llm_engines, migrations, placement
from farm.store.database import Store
from farm.store.nodes import name_is_taken, nodes, remove
from farm.store.sql.clock import age_of, db_now

log = logging.getLogger(__name__)

STARTING = "starting"
"""The state of a node that holds its name but takes no rollouts yet."""
_POLL_S = 0.5
_ROOT = Path("/proc")


def about(home: Path) -> dict[str, Any]:
    """Return what a node announces about its process, its machine, its home, and the version of its code and schema."""
    try:
        code = version("rollout-farm")
    except PackageNotFoundError:
        code = "unknown"
    machine = {"host": platform.node(), "python": platform.python_version()}
    process = {"process": this_process(), "home": str(home.absolute())}
    return {"version": code, "schema": migrations.head(), **process, **machine}


def is_here(node: Node, home: Path) -> bool:
    """Return whether a node runs on this machine with the same home, so that both see the same files."""
    process = node.info.get("process") or {}
    same_machine = (process.get("boot"), process.get("pids")) == (_boot(), _namespace())
    return same_machine and node.info.get("home") == str(home.absolute())


def this_process() -> dict[str, Any]:
    """Return an identifier of this process, unique over all machines, for `is_gone`."""
    return {"boot": _boot(), "pids": _namespace(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_gone(process: Any) -> bool:
    """Return whether the process with this identifier is known to have ended: it ran on this machine and is gone."""
    if not isinstance(process, dict) or (process.get("boot"), process.get("pids")) != (_boot(), _namespace()):
        return False
    return _began(int(process.get("pid", 0))) != process.get("began")


def take(store: Store, node: Node, timeout_s: float) -> None:
    """Acquire a node's name; waits until a silent holder counts as dead. Raises Conflict if a live supervisor has it.

    The node that is announced so far takes no rollouts.
    """
    starting = replace(node, room=0, handlers=[], info={"process": node.info.get("process")}, state=STARTING)
    logged, last_age_s = False, 0.0
    while (age_s := store.write(lambda connection: _taken(connection, starting, timeout_s))) is not None:
        if age_s < last_age_s:
            raise name_is_taken(node.node)
        last_age_s = age_s
        if not logged:
            logged = True
            wait_s = max(0.0, timeout_s - age_s)
            log.warning(
                "Node name %s is in use (heartbeat %.0f s ago); taking it over in %.0f s unless there is another",
                *(node.node, age_s, wait_s),
            )
        time.sleep(_POLL_S)


def _taken(connection: Connection, node: Node, timeout_s: float) -> float | None:
    """Take the name: None, or for how many seconds its present holder, which may be alive, has been silent."""
    age = age_of(nodes.c.heartbeat_at).label("age")
    row = connection.execute(
        select(nodes.c.instance, nodes.c.info, age).where(nodes.c.node == node.node).with_for_update(key_share=True)
    ).one_or_none()
    if row is None:
        values = {"node": node.node, "instance": node.instance, "state": node.state, "room": 0, "init_slots": 0}
        values |= {"run_slots": 0, "eval_slots": 0, "handlers": [], "info": node.info}
        try:
            with connection.begin_nested():
                connection.execute(insert(nodes).values(started_at=db_now(), heartbeat_at=db_now(), **values))
        except IntegrityError:  # another supervisor took it at the same moment
            return 0.0
        return None
    if row.instance == node.instance:
        return None
    if row.age < timeout_s and not is_gone(row.info.get("process")):
        return float(row.age)
    connection.execute(
        nodes.update()
        .where(nodes.c.node == node.node)
        .values(instance=node.instance, state=node.state, room=0, info=node.info, heartbeat_at=db_now())
    )
    return None


def has(connection: Connection, node: Node) -> bool:
    """Return whether this supervisor still has the name; if so, no other takes it until the transaction ends."""
    own = select(nodes.c.node).where(nodes.c.node == node.node, nodes.c.instance == node.instance)
    return connection.execute(own.with_for_update(key_share=True)).first() is not None


def _boot() -> str:
    try:
        return (_ROOT / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str((_ROOT / "self/ns/pid").readlink())
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; empty if it does not exist or is a zombie."""
    try:
        fields = (_ROOT / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def give_back(connection: Connection, node: Node, owners: Sequence[str]) -> int:
    """Release everything that an ending node holds; return how many rollouts were requeued, 0 if it lost its name."""
    if not has(connection, node):
        return 0
    n = placement.requeue_all(connection, node.node)
    borrowed_sandboxes.end_on(connection, [node.node], f"its node {node.node} was drained")
    for owner in owners:
        llm_engines.forget_user(connection, owner)
    llm_engines.remove_of(connection, node.node)
    remove(connection, node.node)
    return n
