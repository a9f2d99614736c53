"""Rollouts with scripted results: the store's own transitions, without sandboxes, engines or workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, select

from farm.records.node import Node
from farm.records.rollout import Failure, Outcome, Stage
from farm.records.trajectory import NO_VERSION, Segment, token_ids
from farm.store import nodes, placement, trajectories
from farm.store.database import Store
from farm.store.rollouts import Claim, RunSummary, advance, batches, claim, fail, finish, rollouts

NODE = "scripted"
_WORKER = "scripted-worker"
_LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class QueuedRollout:
    """A rollout that is not claimed yet."""

    rollout_id: str
    batch_id: str
    data_source: str
    instance_id: str
    group_index: int
    sample_index: int


Rewards = Callable[[QueuedRollout], float | None]
"""A function that returns the reward of a rollout; None to break it by a fault of the farm."""


class ScriptedRollouts:
    """Runs queued rollouts of a store, with rewards from a function and weights of `version`; counts them."""

    def __init__(self, store: Store, rewards: Rewards, data_sources: Sequence[str], version: int = NO_VERSION) -> None:
        self._store = store
        self._rewards = rewards
        self.version = version
        self.finished: list[str] = []
        node = Node(NODE, 64, 64, 64, 64, list(data_sources), {})
        store.write(lambda connection: nodes.announce(connection, node))

    def queued(self) -> list[QueuedRollout]:
        """Return the unclaimed rollouts, by batch in order of submission."""
        return self._store.read(_queued)

    def run_next(self, n: int | None = None) -> int:
        """Run the next `n` of them, or all, each to its end. Returns how many there were."""
        some = self.queued()[:n]
        self.finish(some)
        return len(some)

    def finish(self, some: Sequence[QueuedRollout]) -> None:
        """Run these, in one transaction."""
        rewards = [self._rewards(each) for each in some]

        def work(connection: Connection) -> None:
            for each, reward in zip(some, rewards, strict=True):
                run_to_end(connection, each, reward, self.version)

        self._store.write(work)
        self.finished += [each.rollout_id for each in some]


def _queued(connection: Connection) -> list[QueuedRollout]:
    columns = (rollouts.c.rollout_id, rollouts.c.batch_id, rollouts.c.data_source, rollouts.c.instance_id)
    rows = connection.execute(
        select(*columns, rollouts.c.group_index, rollouts.c.sample_index)
        .join(batches, batches.c.batch_id == rollouts.c.batch_id)
        .where(rollouts.c.finish_seq.is_(None), rollouts.c.node.is_(None))
        .order_by(batches.c.created_at, rollouts.c.batch_id, rollouts.c.group_index, rollouts.c.sample_index)
    )
    return [QueuedRollout(*row) for row in rows]


def run_to_end(connection: Connection, rollout: QueuedRollout, reward: float | None, version: int = NO_VERSION) -> None:
    """Run one rollout through all its stages, with one training row; without a reward its sandbox breaks."""
    rollout_id = rollout.rollout_id
    placement.place(connection, [placement.StageMessage(rollout_id, 1, Stage.INIT, NODE)], _LEASE_S)
    held = _claimed(connection, rollout_id, Stage.INIT)
    if reward is None:
        assert fail(connection, held, Failure(Outcome.SANDBOX_ERROR, f"{rollout_id}: it broke"), {})
        return
    assert advance(connection, held, _LEASE_S)
    held = _claimed(connection, rollout_id, Stage.RUN)
    trajectories.store_segments(connection, rollout_id, rollout.batch_id, 1, [_row(version)])
    known = None if version == NO_VERSION else version
    summary = RunSummary("submitted", {"answer": "42"}, 1, 2, n_segments=1, version_min=known, version_max=known)
    assert advance(connection, held, _LEASE_S, summary)
    assert finish(connection, _claimed(connection, rollout_id, Stage.EVAL), reward, {}, "scripted")


def _claimed(connection: Connection, rollout_id: str, stage: Stage) -> Claim:
    held = claim(connection, rollout_id, 1, stage, NODE, _WORKER, _LEASE_S)
    assert held is not None
    return held


def _row(version: int) -> Segment:
    ones, logprobs = np.ones(2, np.uint8), np.full(2, -0.5, np.float32)
    return Segment(token_ids([1, 2]), token_ids([3, 4]), ones, logprobs, np.full(2, version, np.int32))
