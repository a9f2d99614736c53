"""The end of each stopped or failed stage: in the store, and in Celery's report."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace

import pytest
from celery.exceptions import Retry, Terminated

from farm.errors import HandlerError, RolloutError, SandboxError
from farm.notifications import Signals
from farm.records.rollout import Rollout, Stage, State
from farm.store import batches
from farm.store.database import Store
from farm.store.rollouts import Claim
from tests.contract.store.test_store import NODE, announce, claimed, new_batch, place
from workers.plugins.plugin_faults import plugin_call
from workers.process.lease_renewal import StopReason
from workers.process.node_breaker import NodeBreaker
from workers.process.watchdog import Hang
from workers.queue.tasks import StageFailed, UnfinishedStage


def begun(store: Store) -> Claim:
    announce(store)
    batch_id = new_batch(store)
    place(store, batch_id)
    return claimed(store, f"{batch_id}.0.0", Stage.INIT)


def unfinished(store: Store, claim: Claim, ends: list[BaseException] | None = None) -> UnfinishedStage:
    """The end of a claim; `ends` gets the errors for which its worker exits."""
    options = SimpleNamespace(retry_s=0.0, node_timeout_s=10.0)
    leases = SimpleNamespace(draining=False)
    signals = Signals("")
    breaker = NodeBreaker(store, signals, "init", NODE, options.node_timeout_s)
    watchdog = SimpleNamespace(exhausted=[].append if ends is None else ends.append)
    parts = {"signals": signals, "options": options, "leases": leases, "breaker": breaker, "watchdog": watchdog}
    worker = SimpleNamespace(store=store, **parts)
    return UnfinishedStage(worker, claim)  # type: ignore[arg-type]


def of(store: Store, claim: Claim) -> Rollout:
    return store.read(lambda connection: batches.rollout(connection, claim.rollout_id))


@pytest.mark.parametrize(
    ("reason", "closed", "n_failures", "n_lost", "end", "says"),
    [
        (StopReason.CANCELLED, False, 0, 0, Terminated, "cancelled"),
        (StopReason.LOST, False, 0, 0, Retry, "stopped (lost)"),
        (StopReason.DRAINED, True, 0, 0, Retry, f"node {NODE} was drained"),
        (StopReason.STALLED, True, 0, 0, Retry, "its worker hangs and ends"),
        (StopReason.HUNG, True, 0, 1, Retry, "possibly caused by this rollout"),
        (StopReason.OVERDUE, True, 1, 0, StageFailed, "exceeded its deadline"),
    ],
)
def test_stopped_stage_ends_by_its_reason(
    sqlite_store: Store,
    reason: StopReason,
    closed: bool,
    n_failures: int,
    n_lost: int,
    end: type[Exception],
    says: str,
) -> None:
    claim = begun(sqlite_store)
    with pytest.raises(end) as raised:
        unfinished(sqlite_store, claim).stopped(reason, asyncio.CancelledError())
    rollout = of(sqlite_store, claim)
    assert (rollout.attempt, rollout.n_failures, rollout.n_lost) == (1 + closed, n_failures, n_lost)
    assert rollout.state is (State.QUEUED if closed else State.ACTIVE)
    assert says in (rollout.failure.message if rollout.failure else str(raised.value))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SandboxError("no space"), "sandbox_error"),
        (HandlerError("a bug"), "handler_error"),
        (ValueError("of the farm"), "agent_error"),
        (asyncio.CancelledError(), "agent_error"),
        (Hang("it blocked the loop", in_loop=True), "handler_error"),
        (Hang("it kept threads busy", in_loop=False), "sandbox_error"),
    ],
)
def test_failed_stage_ends_by_its_error(sqlite_store: Store, error: BaseException, kind: str) -> None:
    claim = begun(sqlite_store)
    with pytest.raises(StageFailed, match=f"^{kind}: "):
        unfinished(sqlite_store, claim).broke(error)
    rollout = of(sqlite_store, claim)
    assert rollout.failure is not None
    assert (rollout.n_failures, rollout.failure.kind) == (1, kind)
    if isinstance(error, RolloutError):
        assert rollout.failure.message == str(error)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many")], ids=["memory", "files"])
def test_missing_resource_of_the_worker_is_no_failure_and_ends_the_worker(
    sqlite_store: Store, error: Exception
) -> None:
    claim, ends = begun(sqlite_store), list[BaseException]()
    with pytest.raises(Retry):
        unfinished(sqlite_store, claim, ends).broke(error)
    rollout = of(sqlite_store, claim)
    assert (rollout.state, rollout.n_failures, rollout.n_lost, ends) == (State.QUEUED, 0, 1, [error])
    assert rollout.failure is not None
    assert "no threads, descriptors or memory left" in rollout.failure.message


def test_plugin_without_memory_has_failed(sqlite_store: Store) -> None:
    """It may have requested more than any machine has, so its worker continues and its attempts are counted."""
    claim, ends = begun(sqlite_store), list[BaseException]()
    with pytest.raises(HandlerError) as caught, plugin_call(claim.rollout_id, "handler h", HandlerError):
        _ = [0] * (1 << 60)
    with pytest.raises(StageFailed):
        unfinished(sqlite_store, claim, ends).broke(caught.value)
    rollout = of(sqlite_store, claim)
    assert (rollout.n_failures, rollout.n_lost, ends) == (1, 0, [])


def test_stage_without_its_claim_writes_nothing(sqlite_store: Store) -> None:
    claim = begun(sqlite_store)
    with pytest.raises(Retry):
        unfinished(sqlite_store, claim).stopped(StopReason.DRAINED, asyncio.CancelledError())
    before = of(sqlite_store, claim)
    with pytest.raises(StageFailed):
        unfinished(sqlite_store, claim).broke(SandboxError("late"))
    assert of(sqlite_store, claim) == before
