"""Stages that hang so that nothing in their own process can stop them: the farm continues, and names the stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import farm
from testkit.deadline import LONG_S
from tests.services.farms import embedded, farm_folder, left_of
from tests.services.unruly import installed_in

NOOP = {"data_source": "noop", "fields": {"seconds": 1.0}}
LIMITS = {"run_s": 3.0, "tool_s": 0.5}


@contextmanager
def running(unruly: bool, **env: Any) -> Iterator[farm.Farm]:
    """Yield a farm that soon checks for hung stages; when it has ended, nothing is left of it."""
    with farm_folder() as folder:
        env |= {"FARM_STALL_S": "2"} | (installed_in(folder) if unruly else {})
        with embedded(folder, **env) as here, farm.connect(here.store_url, broker_url=here.broker_url) as client:
            yield client
        assert left_of(folder) == []


@pytest.fixture(scope="module")
def client() -> Iterator[farm.Farm]:
    with running(False, FARM_OVERDUE_S="1") as result:
        yield result


@pytest.fixture(scope="module")
def unruly_client() -> Iterator[farm.Farm]:
    with running(True, FARM_WARM_POOL="0") as result:
        yield result


@pytest.mark.parametrize(
    ("stuck", "kind", "words"),
    [
        # caused by the policy, with the place; others that ended with it are not
        ("loop", "agent_error", "blocked the event loop of its worker for 2 s in File"),
        ("deaf", "agent_error", "exceeded its deadline"),
        # not even a thread of its process could report the place
        ("lock", "lost", "was lost in stage run"),
    ],
)
def test_hung_stage_fails_only_its_own_rollout(client: farm.Farm, stuck: str, kind: str, words: str) -> None:
    hangs = {"data_source": "noop", "fields": {"seconds": 300.0, "stuck": stuck}}
    request = {"instances": [NOOP] * 6 + [hangs] + [NOOP] * 6, "limits": LIMITS, "max_attempts": 1, "max_losses": 0}
    free = {"instances": [NOOP] * 4, "max_attempts": 1, "max_losses": 5}
    if stuck == "lock":
        # all rollouts of the process are lost with it, and this batch does not allow a loss
        request["instances"] = [hangs]
    result = client.collect(client.submit(request), timeout_s=LONG_S)
    [failed] = [rollout for rollout in result if rollout.state is farm.State.FAILED]
    assert failed.failure is not None
    assert failed.failure.kind == kind
    assert words in failed.failure.message
    others = [rollout for rollout in result if rollout is not failed]
    assert all(rollout.reward == 1.0 for rollout in others)
    again = client.collect(client.submit(free), timeout_s=LONG_S)
    assert all(rollout.reward == 1.0 for rollout in again), "its worker, or the next one, continues"


@pytest.mark.parametrize(
    ("fault", "kind", "words", "n_lost"),
    [
        ("agent:callback blocks", "agent_error", "blocked the event loop of its worker for 2 s in File", 0),
        # any of its rollouts may be the cause: all count a loss, so that this comes to an end
        ("agent:loop blocks", "lost", "was lost because its worker hung", 2),
        # an exit or a segmentation fault that nothing in Python can catch
        ("agent:quit process", "lost", "was lost in stage run", 2),
        ("agent:crash process", "lost", "was lost in stage run", 2),
    ],
)
def test_rollout_that_always_hangs_or_kills_its_worker_fails(
    unruly_client: farm.Farm, fault: str, kind: str, words: str, n_lost: int
) -> None:
    hangs = {"data_source": "unruly", "fields": {"fault": fault}}
    batch_id = unruly_client.submit({"instances": [hangs], "max_attempts": 1, "max_losses": 1})
    (failed,) = unruly_client.collect(batch_id, timeout_s=LONG_S)
    assert failed.failure is not None
    assert (failed.failure.kind, failed.n_lost) == (kind, n_lost), failed.failure
    assert words in failed.failure.message
