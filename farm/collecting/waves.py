"""Waves: the batches of a run, found by their keys, each with its groups that wait to be chosen.

The decision on a whole group is to accept it, to drop it with a reason, or to requeue it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from farm.client.farm import Farm
from farm.client.request_checks import checked_request
from farm.collecting.instance_samplers import SamplerState
from farm.collecting.options import CollectingOptions
from farm.errors import InvalidRequest
from farm.ids import batch_of
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Group, Outcome, Rollout, State, is_too_old
from farm.records.training_run import KeyedBatch
from farm.records.trajectory import NO_VERSION, version_number

AcceptGroup: TypeAlias = Callable[[Group], bool]
"""A trainer's own rule (slime's `dynamic_sampling_filter_path`): True accepts a group that nothing else drops."""

T = TypeVar("T")

METADATA = "collecting"
"""The key of a wave's own metadata in its batch's."""
_PLACE = re.compile(r"^instances\[(\d+)\]")


class GroupDecision(StrEnum):
    """The fate of a whole group: accepted, dropped because of its samples, or (the last two) requeued."""

    ACCEPTED = "accepted"
    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW_SCORED = "too_few_scored"
    REFUSED = "refused"
    UNFINISHED = "unfinished"
    STALE = "stale"

    @property
    def is_final(self) -> bool:
        """False for a requeued group, which says nothing about its instance."""
        return self not in (GroupDecision.UNFINISHED, GroupDecision.STALE)


def usable(rollout: Rollout) -> bool:
    """Return whether a sample can train: it was scored, and has a training row."""
    return rollout.trainable and any(segment.trainable for segment in rollout.segments)


def decide(group: Group, least: int, *, filtered: bool, accept: AcceptGroup | None = None) -> GroupDecision:
    """Decide on a whole group, whatever its age. `least` is the required number of usable samples.

    `filtered` drops groups whose usable samples all have the same reward: their advantages are 0.
    """
    rewards = [rollout.reward for rollout in group.rollouts if usable(rollout)]
    if len(rewards) < least:
        return GroupDecision.TOO_FEW_SCORED
    if filtered and len(set(rewards)) < 2:
        return GroupDecision.EQUAL_REWARDS
    if accept is not None and not accept(group):
        return GroupDecision.REFUSED
    return GroupDecision.ACCEPTED


def stopped(group: Group, least: int, enough: int | None) -> GroupDecision | None:
    """Return why a group must be requeued, if the farm or the collector stopped samples that it needs.

    A group with cancelled samples needs `enough` usable samples (None: all); one with samples that became too old while
    they ran needs `least`.
    """
    n_usable = sum(usable(rollout) for rollout in group.rollouts)
    is_cancelled = any(rollout.state is State.CANCELLED for rollout in group.rollouts)
    if is_cancelled and n_usable < (len(group.rollouts) if enough is None else enough):
        return GroupDecision.UNFINISHED
    if n_usable < least and any(rollout.outcome is Outcome.STALE for rollout in group.rollouts):
        return GroupDecision.STALE
    return None


def too_old(rollout: Rollout, newest: str, steps_behind: int, max_staleness: int | None) -> bool:
    """Return whether a sample is more than `max_staleness` versions behind the newest weights.

    If weights have no numbers, the steps since its request count instead.
    """
    if max_staleness is None:
        return False
    if rollout.version_min is None or version_number(newest) == NO_VERSION:
        return steps_behind > max_staleness
    return is_too_old(rollout.version_min, newest, max_staleness)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sampled tokens: `n_tokens` of `n_samples` that finished, and `n_longest` of the longest sample of `n_groups`."""

    n_samples: int = 0
    n_tokens: int = 0
    n_groups: int = 0
    n_longest: int = 0

    @classmethod
    def of_trained(cls, groups: Iterable[Group]) -> Lengths:
        """Return the lengths of the samples of groups that can train."""
        lengths = [[rollout.n_response_tokens for rollout in group.rollouts if usable(rollout)] for group in groups]
        samples = [n for group in lengths for n in group]
        return cls(len(samples), sum(samples), len(lengths), sum(max(group, default=0) for group in lengths))

    @classmethod
    def of_requested(cls, groups: Iterable[Group], kept: Collection[str] = ()) -> Lengths:
        """Return the lengths of the samples of groups. Of stopped samples, the tokens count but not the samples.

        So the mean is the tokens per finished sample, like total time on test divided by failures. A stopped sample
        counts for the longest of its group with its tokens so far. Samples in `kept` count where they train.
        """
        total = cls()
        for group in groups:
            finished = [each for each in group.rollouts if usable(each)]
            stopped = {each.rollout_id: _tokens_so_far(each) for each in group.rollouts if _was_stopped(each)}
            new = [each.n_response_tokens for each in finished if each.rollout_id not in kept]
            longest = max([*stopped.values(), *(each.n_response_tokens for each in finished)], default=0)
            total += cls(len(new), sum(new) + sum(stopped.values()), 1, longest)
        return total

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(*(a + b for a, b in zip(self.record(), other.record(), strict=True)))

    @property
    def mean_tokens(self) -> float:
        """Tokens per sample; 0 without any."""
        return self.n_tokens / max(1, self.n_samples)

    @property
    def mean_longest_tokens(self) -> float:
        """The mean over groups of the tokens of the longest sample; 0 without any."""
        return self.n_longest / max(1, self.n_groups)

    def record(self) -> list[int]:
        """Return the values for a record."""
        return [self.n_samples, self.n_tokens, self.n_groups, self.n_longest]


def _was_stopped(rollout: Rollout) -> bool:
    return rollout.state is State.CANCELLED or rollout.outcome is Outcome.STALE


def _tokens_so_far(rollout: Rollout) -> int:
    # a sample that did not end has its tokens only in its rows
    return rollout.n_response_tokens or sum(int(segment.response_mask.sum()) for segment in rollout.segments)


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """The groups of one step of a run, in the order in which they were chosen.

    `n_dropped` counts dropped groups by reason; `n_cancelled` those that were cancelled in flight; `n_requeued` those
    whose instances were requeued; `n_carried` those of `groups` requested by an earlier step; `n_open` those that wait
    or continue, without the cancelled ones.

    `trained` are the lengths of the samples of `groups`, `requested` those of these and of requeued groups: if
    `trained` is less, the step favours short samples.
    """

    run: str
    step: int
    groups: tuple[Group, ...]
    n_dropped: Mapping[str, int]
    n_cancelled: int
    n_requeued: int
    n_carried: int
    n_open: int
    trained: Lengths
    requested: Lengths

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All samples of all groups, including failed ones: the input for an adapter."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


def wave_key(run: str, number: int) -> str:
    """Return the idempotency key of a wave."""
    return f"{run}:wave-{number}"


@dataclass(frozen=True, slots=True)
class RequeuedGroup:
    """A group whose instance is requeued: its kept samples, each with the step for which it was requested.

    The new group runs only the missing ones, and has these, too. `lengths` are those of the old group.
    """

    group_id: str
    kept: tuple[tuple[str, int], ...]
    lengths: Lengths

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> RequeuedGroup:
        kept = tuple((rollout_id, step) for rollout_id, step in values["kept"])
        return cls(values["group"], kept, Lengths(*values["lengths"]))

    def record(self) -> dict[str, Any]:
        kept = [list(each) for each in self.kept]
        return {"group": self.group_id, "kept": kept, "lengths": self.lengths.record()}

    @property
    def rollout_ids(self) -> list[str]:
        return [rollout_id for rollout_id, _ in self.kept]


@dataclass(slots=True)
class Wave:
    """One batch of a run. `whole` are its ended groups that wait, by index, in the order in which they ended;
    `decisions` are those on them, whatever their age.

    `settled` are the indices of chosen, dropped or requeued groups. `step` is the step that was being collected when it
    was submitted. `requeued` are the groups that its own replace, by index; empty for fresh instances.
    """

    number: int
    step: int
    batch_id: str
    n_groups: int
    requeued: tuple[RequeuedGroup, ...] = ()
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
        """Return the wave of a batch. Raises InvalidRequest for a batch that only has the key of a wave."""
        if METADATA not in batch.metadata:
            raise InvalidRequest(
                f"batch {batch.batch_id} has the idempotency key {batch.key!r}, but no collector submitted it: choose "
                "another name",
                field="run",
            )
        own = batch.metadata[METADATA]
        requeued = tuple(map(RequeuedGroup.from_record, own.get("requeued", ())))
        return cls(number, own["step"], batch.batch_id, batch.n_rollouts // batch.n_samples, requeued)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Wave:
        requeued = tuple(map(RequeuedGroup.from_record, values.get("requeued", ())))
        numbers = (values["number"], values["step"], values["batch_id"], values["n_groups"])
        return cls(*numbers, requeued, set(values["settled"]))

    def record(self) -> dict[str, Any]:
        """Return the values for a step's record."""
        plain = {name: getattr(self, name) for name in ("number", "step", "batch_id", "n_groups")}
        return plain | {"settled": sorted(self.settled), "requeued": [each.record() for each in self.requeued]}

    @property
    def n_inflight(self) -> int:
        return self.n_groups - len(self.whole) - len(self.settled)

    @property
    def is_settled(self) -> bool:
        return len(self.settled) >= self.n_groups

    def kept(self, index: int) -> list[str]:
        """Return the rollouts of earlier groups that count in the group with this index."""
        return self.requeued[index].rollout_ids if self.requeued else []

    def step_of(self, rollout: Rollout) -> int:
        """Return the step that was being collected when a sample of its groups was requested."""
        kept = self.requeued[rollout.group_index].kept if self.requeued else ()
        return dict(kept).get(rollout.rollout_id, self.step)

    def poll(self, client: Farm, cursor: int) -> None:
        """Take the groups that have become whole; does nothing if no rollout has ended since `cursor`."""
        if cursor <= self.seen:
            return
        for group in ended_groups(client, self.batch_id, self._cursor):
            self._cursor = max(self._cursor, group.cursor)
            index = group.rollouts[0].group_index
            if index not in self.settled:
                # a rescored group comes again
                self.whole[index] = with_kept(client, group, self.kept(index))
                self.decisions.pop(index, None)
        self.seen = cursor

    def cut(self, client: Farm, cursor: int, enough: int) -> None:
        """Cancel the rest of groups with `enough` usable samples; does nothing if no rollout has ended since `cursor`.

        That makes them whole. Repeating it after a crash cancels nothing more.
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
            if self._usable[index] == max(1, enough - len(self.kept(index))) and usable(rollout):
                client.cancel(rollout.group_id)

    def settle(self, index: int) -> None:
        """Note that a group was chosen, dropped or requeued."""
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


def with_kept(client: Farm, group: Group, rollout_ids: Collection[str]) -> Group:
    """Return a group with samples of earlier ones added: they get its batch, its index and its last sample indices.

    They keep their ids. Waits for one that is being rescored.
    """
    if not rollout_ids:
        return group
    by_id = _by_batch(rollout_ids, lambda batch_id: client.stream(batch_id, cursor=0), lambda each: each.rollout_id)
    first, n = group.rollouts[0], len(group.rollouts)
    # stream positions belong to one batch: those of an earlier one mean nothing here
    fields = {"batch_id": first.batch_id, "group_index": first.group_index, "finish_seq": first.finish_seq}
    kept = [
        replace(by_id[rollout_id], sample_index=n + index, **fields)  # type: ignore[arg-type]
        for index, rollout_id in enumerate(rollout_ids)
    ]
    return Group(group.group_id, (*group.rollouts, *kept))


def chosen_groups(client: Farm, group_ids: list[str], kept: Mapping[str, list[str]]) -> tuple[Group, ...]:
    """Return these groups with their training rows, in this order, with kept samples of earlier ones, by id.

    Waits for one that is being rescored.
    """
    known = _by_batch(
        group_ids, lambda batch_id: client.stream_groups(batch_id, cursor=0), lambda group: group.group_id
    )
    return tuple(with_kept(client, known[group_id], kept.get(group_id, ())) for group_id in group_ids)


def _by_batch(ids: Collection[str], stream: Callable[[str], Iterable[T]], id_of: Callable[[T], str]) -> dict[str, T]:
    """Return groups or rollouts by id, read from the streams of their batches as far as needed."""
    wanted_of: dict[str, set[str]] = {}
    for each in ids:
        wanted_of.setdefault(batch_of(each), set()).add(each)
    by_id: dict[str, T] = {}
    for batch_id, wanted in wanted_of.items():
        for item in stream(batch_id):
            if id_of(item) in wanted:
                by_id[id_of(item)] = item
                if wanted <= by_id.keys():
                    break
    return by_id


def wave_metadata(step: int, number: int, state: SamplerState, requeued: Iterable[RequeuedGroup]) -> dict[str, Any]:
    """Return the metadata that a wave's batch stores for its successors."""
    own = {"step": step, "wave": number, "sampler": state}
    # the request of a wave of fresh instances does not change
    return own | ({"requeued": records} if (records := [each.record() for each in requeued]) else {})


def checked_fields(request: Mapping[str, Any], options: CollectingOptions) -> BatchRequest:
    """Return the request of a wave, with one placeholder instance. Raises InvalidRequest naming the field."""
    fields = dict(request)
    for name in ("instances", "idempotency_key", "run"):
        if name in fields:
            raise InvalidRequest("the collector sets it", field=f"request.{name}")
    if METADATA in fields.get("metadata", {}):
        raise InvalidRequest("the collector sets it", field=f"request.metadata.{METADATA}")
    if fields.setdefault("max_staleness", options.max_staleness) != options.max_staleness:
        raise InvalidRequest(
            f"{fields['max_staleness']}, but the options have max_staleness={options.max_staleness}",
            field="request.max_staleness",
        )
    return checked_request({**fields, "instances": [{"data_source": "any", "fields": {}}]})


def of_instance(complaint: tuple[str, str], instances: Sequence[Instance]) -> tuple[str, str]:
    """Return a complaint about a wave with the instance's name in place of its index."""

    def name(match: re.Match[str]) -> str:
        instance = instances[int(match[1])]
        return f"instance {instance.instance_id!r} of {instance.data_source}"

    field, message = complaint
    return _PLACE.sub(name, field), message
