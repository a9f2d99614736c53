"""kill -9 of the parts of an embedded farm: each restarts at its address, and every rollout still ends once."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.errors import ServiceError
from farm.notifications import redis_client
from farm.settings import Settings
from tests.acceptance.faults.test_kill import SLOW, every_rollout_ended_once
from tests.services.farms import QUICK, farm_folder, flower_request, left_of, until

WORDS = {"redis": b"redis-server", "node": b"workers.node", "flower": b"flower"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Embedded]:
    """Yield a farm until the last test of this module stops it; its parts are children of this process."""
    settings = Settings(home=folder / "home", scratch=folder / "scratch", store_url="", broker_url="")
    with Embedded(settings, node_options=["--run", "16"], env=QUICK) as started:
        yield started


def pids(folder: Path, part: str) -> list[int]:
    """Return our own children that are this part of the folder's farm: an earlier test may have a Redis, too."""
    result = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            result += [int(pid) for pid in task.joinpath("children").read_text().split() if _is(pid, folder, part)]
    return result


def _is(pid: str, folder: Path, part: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        ours = str(folder).encode() in words + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return ours and WORDS[part] in words


def kill_and_await_restart(folder: Path, part: str) -> None:
    """Kill it, and wait until it was replaced."""
    (old,) = until(lambda: pids(folder, part), f"there is a {part}")
    os.kill(old, signal.SIGKILL)
    until(lambda: pids(folder, part) not in ([], [old]), f"there is another {part}", 60)


def redis_answers(here: Embedded) -> bool:
    client = redis_client(here.broker_url)
    assert client is not None
    try:
        return bool(client.ping())
    except Exception:
        return False
    finally:
        client.close()


def flower_answers(here: Embedded) -> bool:
    try:
        with urllib.request.urlopen(flower_request(here.flower_url, here.home), timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_killed_parts_are_restarted_and_lose_nothing(
    here: Embedded, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with farm.connect(here.home) as client:
        batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 1})
        for part, n_ended in (("redis", 5), ("node", 15), ("flower", 25), ("redis", 35)):
            until(lambda n=n_ended: client.status(batch_id).n_finished >= n, f"{n_ended} have ended", 120)  # type: ignore[misc]
            kill_and_await_restart(folder, part)
        every_rollout_ended_once(client, batch_id)
        until(lambda: redis_answers(here) and flower_answers(here), "they answer where they did", 60)
        here.check()
    restarted = [line.split(" has exited")[0] for line in caplog.messages if "restarting" in line]
    assert restarted == [f"The {part} of the farm" for part in ("redis", "node", "flower", "redis")]


def test_repeatedly_killed_part_is_given_up(here: Embedded, folder: Path) -> None:
    def given_up() -> bool:
        for pid in pids(folder, "redis"):
            os.kill(pid, signal.SIGKILL)
        try:
            here.check()
        except ServiceError as error:
            return "redis" in str(error)
        return False

    until(given_up, "it is said")
    assert pids(folder, "node"), "the rest goes on until it is stopped"
    here.stop()
    assert left_of(folder) == []
