"""Waves: the batches of a run, found by their keys, each with the groups of it that wait to be chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from farm.client.farm import Farm
from farm.collecting.group_decisions import GroupDecision, usable
from farm.collecting.instance_samplers import SamplerState
from farm.errors import InvalidRequest
from farm.ids import RolloutRef
from farm.records.rollout import Group, Rollout
from farm.records.training_run import KeyedBatch

METADATA = "collecting"
"""The name under which a wave's own metadata stand in its batch's."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """The groups of one step of a run, in the order in which they were chosen.

    `n_dropped` counts whole groups that were left out, by the reason; `n_cancelled` those that were in flight and were
    cancelled, `n_carried` those of `groups` that an earlier step had asked for, `n_open` those that go on.
    """

    run: str
    step: int
    groups: tuple[Group, ...]
    n_dropped: Mapping[str, int]
    n_cancelled: int
    n_carried: int
    n_open: int

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All samples of all groups, the broken ones too: what an adapter takes."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


def wave_key(run: str, number: int) -> str:
    """Return the idempotency key of a wave."""
    return f"{run}:wave-{number}"


@dataclass(slots=True)
class Wave:
    """One batch of a run. `whole` are its groups that have ended and wait, by index, in the order in which they did;
    `decisions` are those on them, whatever their age.

    `settled` are the indices of those that were chosen, dropped or cancelled. `step` is the one that was being
    collected when it was submitted.
    """

    number: int
    step: int
    batch_id: str
    n_groups: int
    settled: set[int] = field(default_factory=set)
    whole: dict[int, Group] = field(default_factory=dict)
    decisions: dict[int, GroupDecision] = field(default_factory=dict)
    seen: int = 0
    _cursor: int = 0
    _ended_cursor: int = 0
    _usable: Counter[int] = field(default_factory=Counter)
    _ended: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, batch: KeyedBatch) -> Wave:
        """Return the wave that a batch is. Raises InvalidRequest for one that only has the key of a wave."""
        if METADATA not in batch.metadata:
            raise InvalidRequest(
                f"batch {batch.batch_id} has the idempotency key {batch.key!r}, and no collector submitted it: choose "
                "another name",
                field="run",
            )
        return cls(number, batch.metadata[METADATA]["step"], batch.batch_id, batch.n_rollouts // batch.n_samples)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Wave:
        settled = set(values["settled"])
        return cls(values["number"], values["step"], values["batch_id"], values["n_groups"], settled)

    def record(self) -> dict[str, Any]:
        """Return what a step's record holds of it."""
        plain = {name: getattr(self, name) for name in ("number", "step", "batch_id", "n_groups")}
        return plain | {"settled": sorted(self.settled)}

    @property
    def unfinished(self) -> list[int]:
        """The indices of the groups in flight."""
        return [index for index in range(self.n_groups) if index not in self.whole and index not in self.settled]

    @property
    def n_inflight(self) -> int:
        return self.n_groups - len(self.whole) - len(self.settled)

    @property
    def is_settled(self) -> bool:
        return len(self.settled) >= self.n_groups

    def poll(self, client: Farm, cursor: int) -> None:
        """Take the groups that have become whole, if anything ended since `cursor` was less."""
        if cursor <= self.seen:
            return
        for group in ended_groups(client, self.batch_id, self._cursor):
            self._cursor = max(self._cursor, group.cursor)
            index = group.rollouts[0].group_index
            if index not in self.settled:
                # one that is scored again comes again
                self.whole[index] = group
                self.decisions.pop(index, None)
        self.seen = cursor

    def cut(self, client: Farm, cursor: int, enough: int) -> None:
        """Cancel what is left of groups that have `enough` usable samples, if anything ended since `cursor` was less.

        They become whole by it. Cancelled again after a crash, nothing more is cancelled.
        """
        if cursor <= self._ended_cursor:
            return
        for rollout in ended_rollouts(client, self.batch_id, self._ended_cursor):
            self._ended_cursor = max(self._ended_cursor, rollout.cursor)
            index = rollout.group_index
            if rollout.rollout_id in self._ended.setdefault(index, set()):
                continue
            self._ended[index].add(rollout.rollout_id)
            self._usable[index] += usable(rollout)
            if self._usable[index] == enough and usable(rollout):
                client.cancel(rollout.group_id)

    def settle(self, index: int) -> None:
        """Note that a group was chosen, dropped or cancelled."""
        self.whole.pop(index, None)
        self.settled.add(index)


def ended_groups(client: Farm, batch_id: str, cursor: int) -> Iterator[Group]:
    """Yield the groups of a batch that are whole now, without waiting for others."""
    try:
        yield from client.stream_groups(batch_id, cursor=cursor, timeout_s=0.0)
    except TimeoutError:
        return


def ended_rollouts(client: Farm, batch_id: str, cursor: int) -> Iterator[Rollout]:
    """Yield the rollouts of a batch that have ended now, without waiting for others."""
    try:
        yield from client.stream(batch_id, cursor=cursor, timeout_s=0.0)
    except TimeoutError:
        return


def chosen_groups(client: Farm, group_ids: list[str]) -> tuple[Group, ...]:
    """Return these groups with their training rows, in this order. One that is being scored again is waited for."""
    by_batch: dict[str, set[str]] = {}
    for group_id in group_ids:
        by_batch.setdefault(RolloutRef.of(group_id).batch_id, set()).add(group_id)
    known: dict[str, Group] = {}
    for batch_id, wanted in by_batch.items():
        for group in client.stream_groups(batch_id, cursor=0):
            if group.group_id in wanted:
                known[group.group_id] = group
                if wanted <= known.keys():
                    break
    return tuple(known[group_id] for group_id in group_ids)


def wave_metadata(step: int, number: int, state: SamplerState) -> dict[str, Any]:
    """Return what the batch of a wave remembers for whoever goes on after it."""
    return {"step": step, "wave": number, "sampler": state}
