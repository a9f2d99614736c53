"""The counts of a batch equal those of its rows, whenever ended rollouts are summed, and whatever happens between."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from sqlalchemy import Connection, select

from farm.errors import NotFound
from farm.ids import RolloutRef
from farm.observing.observer import Observer
from farm.records.rollout import Failure, Stage
from farm.retry_policy import retry_decision
from farm.store import attempts, batches, cancel_and_rescore, rollout_counts
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports import audit, histograms, summaries
from farm.store.rollouts import rollouts
from farm.store.sql.schema import MeasuredBatchRow
from tests.contract.store.test_store import announce, claimed, finish, new_batch, place, run_to_end
from tests.contract.store.test_store_rescore import cancel, rescore


def observe(store: Store) -> None:
    Observer(store, lambda: True).look()


def rows(store: Store, batch_id: str) -> Counter[tuple[str, str, str | None]]:
    columns = (rollouts.c.stage, rollouts.c.state, rollouts.c.failure_kind)
    statement = select(*columns).where(rollouts.c.batch_id == batch_id)
    return Counter(store.read(lambda connection: connection.execute(statement).tuples().all()))


def counted(store: Store, *batch_ids: str) -> Counter[tuple[str, str, str | None]]:
    result: Counter[tuple[str, str, str | None]] = Counter()
    for count in store.read(lambda connection: rollout_counts.rollout_counts(connection, batch_ids)):
        result[count.stage.value, count.state.value, count.failure_kind] += count.n
    return result


def summed(store: Store, batch_id: str) -> int:
    row = MeasuredBatchRow
    statement = select(row.ended_seq).where(row.batch_id == batch_id)
    return store.read(lambda connection: connection.execute(statement).scalar()) or 0


def fail(store: Store, rollout_id: str) -> None:
    held = claimed(store, rollout_id, Stage.INIT)
    failure, decision = Failure("sandbox_error", "broken"), retry_decision("sandbox_error", False)
    settings = RetrySettings(0.0, 60.0)
    store.write(lambda connection: attempts.end_attempt(connection, held, failure, decision, settings))


@pytest.mark.parametrize("seed", range(6))
def test_counts_equal_the_rows_at_every_moment(store: Store, seed: int) -> None:
    drawn = random.Random(seed)
    announce(store)
    batch_id, other = new_batch(store, 12), new_batch(store, 3)
    place(store, batch_id)
    left = [f"{batch_id}.{index}.0" for index in range(12)]
    drawn.shuffle(left)
    done: list[str] = []
    for _ in range(24):
        match drawn.choice(["run", "run", "fail", "cancel", "rescore", "look", "look"]):
            case "run" if left:
                done.append(left.pop())
                run_to_end(store, done[-1], reward=drawn.choice([0.1, 0.7, -1.0]))
            case "fail" if left:
                fail(store, left.pop())
            case "cancel" if left:
                cancel(store, left.pop())
            case "rescore" if done:
                again = drawn.choice(done)
                (rollout_id,) = rescore(store, again)
                place(store, batch_id)
                attempt = store.read(partial(batches.rollout, rollout_id=rollout_id)).attempt
                finish(store, claimed(store, rollout_id, Stage.EVAL, attempt), 0.5)
            case "look":
                observe(store)
            case _:
                continue
        assert counted(store, batch_id) == rows(store, batch_id)
        status = store.read(partial(batches.status, batch_id=batch_id))
        rewards = [each.reward for each in store.read(partial(batches.rollouts_of, batch_id=batch_id)) if each.reward]
        assert status.mean_reward == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
        (summary,) = (each for each in store.read(partial(summaries.newest, limit=9)) if each.batch_id == batch_id)
        assert (summary.n_completed, summary.n_failed, summary.n_cancelled) == (
            *(status.n_completed, status.n_failed, status.n_cancelled),
        )
        assert store.read(partial(audit.violations, batch_id=batch_id)) == []
    assert counted(store, batch_id, other) == rows(store, batch_id) + rows(store, other)


def test_summed_rollouts_are_not_read_again(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, 2)
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0")
    observe(store)
    assert summed(store, batch_id) == 1
    # a change that the farm never makes shows which rows are read
    hidden = rollouts.update().where(rollouts.c.rollout_id == f"{batch_id}.0.0").values(failure_kind="hidden")
    store.write(lambda connection: connection.execute(hidden) and None)
    assert counted(store, batch_id)["eval", "completed", None] == 1
    rescore(store, batch_id)
    assert summed(store, batch_id) == 0
    assert counted(store, batch_id) == rows(store, batch_id)


def test_wrong_sums_are_a_violation(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, 2)
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0")
    observe(store)
    wrong = MeasuredBatchRow.__table__.update().values(ended=[["eval", "completed", None, 3, 1.0, 0, 0]])
    store.write(lambda connection: connection.execute(wrong) and None)
    (found,) = store.read(partial(audit.violations, batch_id=batch_id))
    assert (found.id, found.what) == (batch_id, "3 ended rollouts are summed up, 1 are there")


def test_rewards_beyond_the_range_of_their_sum_have_a_mean(store: Store) -> None:
    announce(store)
    batch_id = new_batch(store, 3)
    place(store, batch_id)
    for index in range(3):
        run_to_end(store, f"{batch_id}.{index}.0", reward=1.5e308)
        if index == 1:
            observe(store)
    assert store.read(partial(batches.status, batch_id=batch_id)).mean_reward == pytest.approx(1.5e308)


@pytest.mark.parametrize("first", ["look", "rescore"])
def test_concurrent_rescore_and_sum_keep_counts_correct(store: Store, first: str) -> None:
    """Whichever of two transactions began first, no rescored rollout stays in the sums."""
    announce(store)
    batch_id = new_batch(store, 2)
    place(store, batch_id)
    run_to_end(store, f"{batch_id}.0.0")
    begun, go = threading.Event(), threading.Event()

    def slowly(connection: Connection, work: Callable[[Connection], object]) -> None:
        work(connection)
        begun.set()
        assert go.wait(30)

    found = store.read(partial(histograms.counted, batch_id=batch_id, after=0, last=1))
    add = partial(histograms.add, batch_id=batch_id, after=0, last=1, histograms=found)
    again = partial(rescore, store, batch_id)

    def rescoring(connection: Connection) -> object:
        return cancel_and_rescore.rescore(connection, RolloutRef.of(batch_id))

    slow, fast = (add, again) if first == "look" else (rescoring, partial(store.write, add))
    one = threading.Thread(target=lambda: store.write(partial(slowly, work=slow)))
    two = threading.Thread(target=fast)
    one.start()
    assert begun.wait(30)
    two.start()
    # time for the second transaction to reach the locks of the first
    time.sleep(0.3)
    go.set()
    one.join()
    two.join()
    assert counted(store, batch_id) == rows(store, batch_id)
    assert store.read(partial(audit.violations, batch_id=batch_id)) == []


def test_unknown_batch_has_no_counts(store: Store) -> None:
    assert counted(store, "none") == Counter()
    with pytest.raises(NotFound):
        store.read(partial(batches.status, batch_id="none"))
