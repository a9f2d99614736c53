"""Locks between processes, also when a holder is killed, suspended or lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from workers.sandboxes.images.shared_lock import exclusive, if_free, shared

ROOT = Path(__file__).parents[5]
HOLD = """
import sys
from pathlib import Path
from workers.sandboxes.images.shared_lock import exclusive, shared
with {kind}(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path, kind: str = "exclusive") -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock."""
    command = [sys.executable, "-c", HOLD.format(kind=kind), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_only_one_process_holds_the_lock_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with exclusive(tmp_path / "deep/lock") as held:
                assert held
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 160
    assert max(most) == 1


def test_killed_holder_releases_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with held_elsewhere(lock) as process:
        with if_free(lock) as free:
            assert not free
        process.send_signal(signal.SIGKILL)
        process.wait()
        with exclusive(lock) as held:
            assert held


def test_holder_without_a_heartbeat_is_not_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with held_elsewhere(lock) as process:
        process.send_signal(signal.SIGSTOP)
        with exclusive(lock, dead_s=0.2) as held:
            assert not held, "it continues without the lock"


def test_holder_with_a_heartbeat_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with held_elsewhere(lock) as process:
        stop = threading.Event()

        def show_life() -> None:
            for _ in range(40):
                os.utime(lock)
                stop.wait(0.02)
            process.kill()

        threading.Thread(target=show_life).start()
        with exclusive(lock, dead_s=0.4) as held:
            assert held
        stop.set()


def test_deleted_lock_file_is_another_lock(tmp_path: Path) -> None:
    """A waiter with the old file open must not believe that it holds the new one exclusively."""
    lock = tmp_path / "lock"
    lock.touch()
    with if_free(lock) as free:
        assert free
        lock.unlink()
        with exclusive(lock) as held:
            assert held
            with if_free(lock) as still_free:
                assert not still_free


def test_shared_lock_has_several_holders(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with pytest.raises(FileNotFoundError), shared(lock):
        pass
    lock.touch()
    with held_elsewhere(lock, "shared") as process:
        with shared(lock):
            process.kill()
            process.wait()
            with if_free(lock) as free:
                assert not free
        with if_free(lock) as free:
            assert free


def test_shared_lock_is_inherited_by_a_child_that_runs_on(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with shared(lock) as descriptor:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    with if_free(lock) as free:
        assert not free
    child.communicate()
    with if_free(lock) as free:
        assert free
