"""Loads over a real Redis: all see the calls in flight of all, also when a process is killed or Redis is down."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farm.notifications import redis_client
from tests.services.farms import until
from tests.services.servers.redis import redis_server
from workers.policy.routing.load import IDLE, Load, LoadTracker, SharedLoads

ROOT = Path(__file__).parents[3]
URL = "http://e/v1"
HOLDER = """
import sys
from farm.notifications import redis_client
from workers.policy.routing.load import SharedLoads, LoadTracker
shared = SharedLoads(redis_client(sys.argv[1]), "killed", every_s=0.02)
tally = LoadTracker(shared)
shared.start(tally)
with tally.taken("http://e/v1", 500), tally.taken("http://e/v1", 70):
    print("holds", flush=True)
    sys.stdin.read()
"""


class _Worker:
    """The counts of one process."""

    def __init__(self, broker_url: str, owner: str, stack: ExitStack, expires_s: float = 4.0) -> None:
        client = redis_client(broker_url)
        assert client is not None
        stack.callback(client.close)
        self.shared = SharedLoads(client, owner, every_s=0.02, beat_s=0.1, expires_s=expires_s)
        self.tally = LoadTracker(self.shared)
        self.shared.start(self.tally)
        stack.callback(self.shared.close)

    def sees(self, load: Load) -> None:
        until(lambda: self.tally.of(URL) == load, lambda: f"{load} is seen, not {self.tally.of(URL)}")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_load_is_visible_to_all_processes(broker_url: str, stack: ExitStack) -> None:
    first, second = (_Worker(broker_url, name, stack) for name in ("a", "b"))
    with first.tally.taken(URL, 100):
        second.sees(Load(1, 100))
        with second.tally.taken(URL, 11):
            first.sees(Load(2, 111))
            assert first.tally.own(URL) == Load(1, 100)
    first.sees(IDLE)
    second.sees(IDLE)


def test_speed_is_shared_until_it_is_measured_locally(broker_url: str, stack: ExitStack) -> None:
    first, second = (_Worker(broker_url, name, stack) for name in ("a", "b"))
    assert second.tally.speed(URL) is None
    first.tally.measured(URL, 100, 0.5, 4.0)
    until(lambda: second.tally.speed(URL) == 400.0, "the speed is known")
    second.tally.measured(URL, 100, 1.0, 1.0)
    assert second.tally.speed(URL) == 100.0, "what it measured itself counts more"


def test_load_of_a_killed_process_expires(broker_url: str, stack: ExitStack) -> None:
    watcher = _Worker(broker_url, "watcher", stack)
    command = [sys.executable, "-c", HOLDER, broker_url]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        watcher.sees(Load(2, 570))
        holder.send_signal(signal.SIGKILL)
    watcher.sees(IDLE)
    client = redis_client(broker_url)
    assert client is not None
    with client:
        until(lambda: client.smembers(SharedLoads.OWNERS) == {b"watcher"}, "its name is gone, too")


def test_load_of_a_closed_process_is_removed_at_once(broker_url: str, stack: ExitStack) -> None:
    watcher, other = _Worker(broker_url, "watcher", stack), _Worker(broker_url, "other", stack, expires_s=1000)
    with other.tally.taken(URL, 5):
        watcher.sees(Load(1, 5))
        other.shared.close()
        watcher.sees(IDLE)


def test_process_without_redis_sees_only_its_own_load(redis_url: str, stack: ExitStack) -> None:
    with redis_server() as url:
        first, second = (_Worker(url, name, stack) for name in ("a", "b"))
        with first.tally.taken(URL, 100):
            second.sees(Load(1, 100))
            held = stack.enter_context(ExitStack())
            held.enter_context(first.tally.taken(URL, 1))
    second.sees(IDLE)
    assert first.tally.of(URL) == Load(1, 1)


def test_unreadable_load_of_another_process_is_ignored(broker_url: str, stack: ExitStack) -> None:
    client = redis_client(broker_url)
    assert client is not None
    with client:
        client.sadd(SharedLoads.OWNERS, "newer")
        client.set(f"{SharedLoads.KEY}newer", b"[not JSON")
        worker = _Worker(broker_url, "a", stack)
        with worker.tally.taken(URL, 7):
            until(lambda: client.exists(f"{SharedLoads.KEY}a"), "it publishes")
            assert worker.tally.of(URL) == Load(1, 7)
