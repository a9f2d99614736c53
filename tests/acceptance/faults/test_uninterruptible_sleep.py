"""Processes of a sandbox in uninterruptible sleep, immune to SIGKILL: their rollouts end, and no other is affected."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.records.rollout import Outcome, Rollout, Stage, State
from tests.conftest import absent
from tests.services.farms import embedded, farm_folder, left_of, paths_below, until
from tests.services.servers.fuse import missing, state_of
from tests.services.silent_mounts import PLACE, installed_in

LIMITS = {"run_s": 60, "tool_s": 3}
PROGRAM = f"cat {PLACE}/x"
SHELL = f"read x < {PLACE}/x"


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture
def servers(folder: Path) -> Iterator[Path]:
    """Yield the folder of the marker files of the servers of hanging FUSE mounts."""
    made = folder / "servers"
    made.mkdir()
    if os.geteuid():
        pytest.skip("only root may mount something in a sandbox")
    if why := missing():
        absent(why)
    yield made
    wake(made)


def wake(servers: Path) -> None:
    """Let the kernel wake all sleepers."""
    for mark in servers.iterdir():
        if mark.name.isdecimal():
            with suppress(ProcessLookupError):
                os.kill(int(mark.name), signal.SIGKILL)
            mark.unlink()


def uninterruptible_processes() -> list[str]:
    """Return this machine's processes in uninterruptible sleep, immune to SIGKILL."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and state_of(int(entry.name)) == "D":
            with suppress(OSError):
                result.append((entry / "comm").read_text().strip())
    return result


def test_uninterruptible_processes_fail_only_their_own_rollouts(folder: Path, servers: Path) -> None:
    def instance(**fields: Any) -> dict[str, Any]:
        return {"data_source": "asleep", "fields": {"servers": str(servers)} | fields}

    lively = instance(servers="")
    ways = ("read", "download", "upload")
    request = {
        "instances": [
            *[lively] * 4,
            instance(command=PROGRAM),
            instance(command=SHELL),
            *(instance(collect=way) for way in ways),
            *[lively] * 4,
        ],
        "limits": LIMITS,
        "max_attempts": 1,
        "max_losses": 0,
    }
    env: dict[str, Any] = installed_in(folder) | {"FARM_OVERDUE_S": "30", "FARM_WARM_POOL": "0"}
    with embedded(folder, **env) as here, farm.connect(here.home) as client:
        workers = workers_of(
            client, client.collect(client.submit(request | {"instances": [lively] * 4}), timeout_s=600)
        )
        cancelled = client.submit({"instances": [instance(command=PROGRAM)], "limits": {"tool_s": 600}})
        until(lambda: client.status(cancelled).stages[Stage.RUN][State.ACTIVE], "it runs")
        result = client.collect(client.submit(request), timeout_s=600)
        client.cancel(cancelled)
        blocked, (program, shell, *collected) = [*result[:4], *result[9:]], result[4:9]
        assert workers_of(client, blocked) == workers
        # like any command beyond its time limit: the policy gets an error, and continues
        for each in (program, shell):
            assert (each.outcome, each.reward) == (Outcome.SUBMITTED, 1.0), each.failure
        for way, each in zip(ways, collected, strict=True):
            assert each.reward is None
            assert each.failure is not None
            assert each.failure.kind == "handler_error", each.failure
            assert (
                "collecting the submission timed out: TimeoutError: it took longer than 3 s" in each.failure.message
            ), way
        [gone] = client.collect(cancelled, timeout_s=600)
        assert (gone.state, gone.reward) == (State.CANCELLED, None)
        sandboxes = folder / "scratch"
        until(lambda: not list(sandboxes.glob("*/sandboxes/[!.]*")), "no sandbox is there any more")
        assert uninterruptible_processes().count("cat") >= 2, "they sleep on"
        again = client.collect(client.submit(request | {"instances": [lively] * 8}), timeout_s=600)
        assert workers_of(client, again) == workers, "the same workers continue"
    assert not [path for path in paths_below(sandboxes) if path.parent.name == "sandboxes"]
    wake(servers)
    until(lambda: not left_of(folder), lambda: f"nothing is left: {left_of(folder)}")


def workers_of(client: farm.Farm, rollouts: list[Rollout]) -> set[tuple[str, ...]]:
    """Return by which processes scored rollouts were run and scored."""
    assert [rollout.reward for rollout in rollouts] == [1.0] * len(rollouts), [each.failure for each in rollouts]
    return {tuple(client.rewards(rollout.rollout_id)[-1].details["workers"]) for rollout in rollouts}
