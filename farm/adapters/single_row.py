"""One row for each rollout, for trainers that take no more: the choice of its segment, and placeholders.

A rollout with a branched or rewritten history has several segments. Its row is the one with the most sampled tokens
(the first of several), which holds most of what the policy did; the others do not train.

A trainer that divides by the number of its samples also needs a row for a failed rollout: a placeholder with one token
that does not train. Most trainers need a number as its reward, and a zero would shift the mean of its group. So the
reward is `neutral`, the mean of the scored siblings: the group's mean and the others' advantages are as if it were not
there. Only if a trainer divides by the standard deviation, they are larger than among the scored siblings, by
sqrt((n - 1) / (k - 1)) for k of n scored. Alternatively the whole group is masked (`mask_group`).

slime's generate function and OpenRLHF's agent executor are called once for each sample, all samples of a problem at the
same moment. Run one by one they would have no siblings, and so no group mean for a failed one: a window makes one group
of simultaneous calls for one problem.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np

from farm.adapters.protocol import training_rows
from farm.adapters.trainer_step import check_has_ids, check_vocabulary, too_long
from farm.errors import InvalidRequest, NoTrainableRollouts
from farm.records.experts.routed_experts import ExpertIds, RowExperts
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout
from farm.records.trajectory import NO_VERSION, Segment, token_ids

BrokenRollouts: TypeAlias = Literal["neutral", "mask_group"]
TooLong: TypeAlias = Literal["error", "cut", "mask"]

T = TypeVar("T")

CUT = frozenset({Outcome.MAX_TURNS, Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL, Outcome.DEADLINE})
"""Outcomes of a policy that a limit cut short. A policy that repeated itself is not included: trainers leave out or
mask truncated rollouts, but should learn from a repetition."""
ABORTED = frozenset({Outcome.CANCELLED, Outcome.STALE})
_NONE: Mapping[Outcome, T] = MappingProxyType({})  # type: ignore[valid-type]

Sample = TypeVar("Sample")
Result = TypeVar("Result")

WINDOW_S = 0.05
_MOST_BROKEN = 16


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The lengths of a trainer's arrays, by the names of its options, and its vocabulary size; None: no limit.

    `too_long`: `error` refuses a longer row; `cut` cuts its response, and masks a row with a longer prompt, as a cut
    prompt would be a different one; `mask` masks both.
    """

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    total_tokens: int | None = None
    vocabulary: int | None = None
    too_long: TooLong = "error"
    prompt_option: str = "max_prompt_tokens"
    response_option: str = "max_response_tokens"
    total_option: str = "max_tokens"

    def fitted(self, rollout_id: str, segment: Segment) -> Segment | None:
        """Return the row in the form that the trainer can take; None if it cannot. Raises InvalidRequest."""
        check_vocabulary(rollout_id, segment, self.vocabulary)
        n_prompt, n_response = len(segment.prompt_ids), len(segment.response_ids)
        if self.prompt_tokens is not None and n_prompt > self.prompt_tokens:
            self._refuse(rollout_id, "prompt", n_prompt, self.prompt_tokens, self.prompt_option)
            return None
        most = n_response
        if self.response_tokens is not None and n_response > self.response_tokens:
            self._refuse(rollout_id, "response", n_response, self.response_tokens, self.response_option)
            most = self.response_tokens
        if self.total_tokens is not None and n_prompt + most > self.total_tokens:
            self._refuse(rollout_id, "row", n_prompt + n_response, self.total_tokens, self.total_option)
            most = max(self.total_tokens - n_prompt, 0)
        if most == n_response:
            return segment
        if self.too_long != "cut":
            return None
        cut = segment.cut(most)
        return cut if cut.trainable else None

    def _refuse(self, rollout_id: str, noun: str, n_tokens: int, most: int, option: str) -> None:
        if self.too_long == "error":
            raise too_long(rollout_id, noun, n_tokens, most, option)


NO_LIMITS = RowLimits()


@dataclass(frozen=True, slots=True)
class StepRow:
    """The rows of one rollout: its training `segments`, at least one, or a placeholder with mask 0.

    `reward` is its own, or the neutral one if it is not `scored`: it failed, or was `too_long` for the trainer.
    `masked` rows do not train. `group_unscored` is True if nothing in its group was scored.
    """

    rollout: Rollout
    segments: tuple[Segment, ...]
    reward: float
    scored: bool
    masked: bool
    too_long: bool = False
    group_unscored: bool = False


def most_sampled(segments: Sequence[Segment]) -> Segment:
    """Return the segment with the most sampled tokens, the first of several."""
    return max(segments, key=lambda segment: int(segment.response_mask.sum()))


def single_rows(rollouts: Sequence[Rollout], min_version: int | None = None) -> Iterator[tuple[Rollout, Segment]]:
    """Yield each rollout that may train with its one row; the others are left out."""
    for rollout in rollouts:
        if own := [segment for _, segment in training_rows([rollout], min_version)]:
            yield rollout, most_sampled(own)


def rows_of_step(
    rollouts: Sequence[Rollout],
    *,
    min_version: int | None = None,
    broken: BrokenRollouts = "neutral",
    limits: RowLimits = NO_LIMITS,
    every_segment: bool = False,
    pad_id: int = 0,
    fallback: float | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[StepRow]:
    """Return a row for every rollout of a step, in order: from one segment, or with `every_segment` from all.

    A rollout that the policy ended before it sampled a token keeps its reward. A rollout that failed, was cancelled, is
    stale, is not token-exact, or is masked as too long, has the neutral reward. `groups` are the trainer's own, a value
    for each rollout, if they differ from the farm's. Raises InvalidRequest, naming the rollout and the option, for rows
    that the trainer cannot take; and NoTrainableRollouts if none may train, unless there is a `fallback` for the
    neutral reward, e.g. for a part of a step.
    """
    if broken not in ("neutral", "mask_group"):
        raise InvalidRequest("must be neutral or mask_group", field="broken")
    check_has_ids(rollouts)
    segments = [_segments(rollout, min_version, limits, every_segment) for rollout in rollouts]
    if fallback is None and not any(segments):
        raise NoTrainableRollouts(_reasons(rollouts))
    exact = [any(True for _ in training_rows([rollout], min_version)) for rollout in rollouts]
    too_long = [has_rows and not own for has_rows, own in zip(exact, segments, strict=True)]
    scored = [
        (has_rows and not long) or _is_empty(rollout)
        for rollout, has_rows, long in zip(rollouts, exact, too_long, strict=True)
    ]
    keys = [each.group_id for each in rollouts] if groups is None else list(groups)
    neutral = _neutral_rewards(rollouts, scored, keys, fallback or 0.0)
    whole = {key for key, counts in zip(keys, scored, strict=True) if counts}
    hit = {key for key, counts, long in zip(keys, scored, too_long, strict=True) if not counts and not long}
    rows = []
    for rollout, own, counts, long, key in zip(rollouts, segments, scored, too_long, keys, strict=True):
        masked = not own or (broken == "mask_group" and key in hit)
        reward = rollout.reward if counts and rollout.reward is not None else neutral[key]
        used = own or (_placeholder(rollout, pad_id, limits),)
        shown = tuple(each.masked() for each in used) if masked else used
        rows.append(StepRow(rollout, shown, float(reward), counts, masked, long, key not in whole))
    return rows


def _segments(rollout: Rollout, min_version: int | None, limits: RowLimits, every: bool) -> tuple[Segment, ...]:
    own = [segment for _, segment in training_rows([rollout], min_version)]
    chosen = own if every else [most_sampled(own)] if own else []
    fitted = (limits.fitted(rollout.rollout_id, segment) for segment in chosen)
    return tuple(segment for segment in fitted if segment is not None)


def _is_empty(rollout: Rollout) -> bool:
    """Return whether the policy ended it before a token was sampled, so that its reward counts without a row."""
    nothing_sampled = all(segment.mismatch is None and not segment.trainable for segment in rollout.segments)
    return rollout.trainable and nothing_sampled


def _neutral_rewards(
    rollouts: Sequence[Rollout], scored: Sequence[bool], keys: Sequence[Hashable], fallback: float
) -> dict[Hashable, float]:
    """Return the mean reward of each group's scored rollouts; for a group without any, the step's mean."""
    rewards: dict[Hashable, list[float]] = {key: [] for key in keys}
    for rollout, counts, key in zip(rollouts, scored, keys, strict=True):
        if counts and rollout.reward is not None:
            rewards[key].append(rollout.reward)
    every = [reward for own in rewards.values() for reward in own]
    of_step = float(np.mean(every)) if every else fallback
    return {group: float(np.mean(own)) if own else of_step for group, own in rewards.items()}


def _placeholder(rollout: Rollout, pad_id: int, limits: RowLimits) -> Segment:
    """Return a row of one token that does not train, after the rollout's own prompt if that fits."""
    prompt = rollout.segments[0].prompt_ids if rollout.segments else token_ids([])
    if not len(prompt) or (limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens):
        prompt = token_ids([pad_id])
    return Segment(
        prompt, token_ids([pad_id]), np.zeros(1, np.uint8), np.zeros(1, np.float32), np.full(1, NO_VERSION, np.int32)
    )


def with_experts(step_rows: Sequence[StepRow], form: tuple[int, int], option: str) -> list[StepRow]:
    """Return the rows with the experts of all their tokens but the last, for a trainer that replays them.

    A row that trains has the recorded ones. A row that does not, as it failed or has no sampled token, gets experts 0,
    1, 2 and so on in each layer. `form` is (layers of the trainer's model, experts per token). Raises InvalidRequest,
    naming the rollout and the trainer's option, for a training row without experts, or with those of another model.
    """
    return [
        replace(row, segments=tuple(_routed(row, segment, form, option) for segment in row.segments))
        for row in step_rows
    ]


def _routed(row: StepRow, segment: Segment, form: tuple[int, int], option: str) -> Segment:
    n_tokens = len(segment.prompt_ids) + len(segment.response_ids)
    experts = segment.routed_experts
    if row.masked or not segment.response_mask.any():
        flat = np.tile(np.arange(form[1], dtype=np.uint8), n_tokens * form[0])
        return replace(segment, routed_experts=RowExperts(flat, *form, np.ones(n_tokens, np.uint8)))
    if experts is None or experts.first_unknown < n_tokens - 1:
        raise InvalidRequest(
            f"the routed experts of rollout {row.rollout.rollout_id} were not recorded for each of its tokens: if "
            "the settings give the sampling, it needs routed_experts",
            field=option,
        )
    if (experts.n_layers, experts.top_k) != form:
        raise InvalidRequest(
            f"the routed experts of rollout {row.rollout.rollout_id} are of {experts.n_layers} layers with "
            f"{experts.top_k} each, and the trainer's model has {form[0]} with {form[1]}",
            field=option,
        )
    return segment


def replayed(segment: Segment) -> ExpertIds | None:
    """Return the experts of a row without the last token's, as engines return them; None if it has none."""
    return None if segment.routed_experts is None else segment.routed_experts.ids[:-1]


def _reasons(rollouts: Sequence[Rollout]) -> str:
    """Return, in words, why none of these may train."""
    outcomes = Counter(str(rollout.outcome or rollout.state) for rollout in rollouts)
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    failures = [f"{each.rollout_id}: {each.failure.message}" for each in rollouts if each.failure is not None]
    first = f"; the first: {failures[0]}" if failures else ""
    return f"none of {len(rollouts)} rollouts may train: {counts}{first}"


def reason_table(*, ended: T, cut: T, broken: T, aborted: T, named: Mapping[Outcome, T] = _NONE) -> dict[Outcome, T]:
    """Return a trainer's word for each outcome: `ended` by the policy, `cut` by a limit, `broken` by the farm, or
    `aborted`. `named` overrides single outcomes for which the trainer has its own word.
    """

    def word(outcome: Outcome) -> T:
        if outcome in ABORTED:
            return aborted
        if outcome not in POLICY_OUTCOMES:
            return broken
        return cut if outcome in CUT else ended

    return {outcome: named.get(outcome, word(outcome)) for outcome in Outcome}


@dataclass
class _Group(Generic[Sample, Result]):
    """The samples of a problem so far, and the results of all of them, in order."""

    results: asyncio.Future[Sequence[Result]]
    samples: list[Sample] = field(default_factory=list)


@dataclass
class SampleWindow(Generic[Sample, Result]):
    """Gathers calls with one key that come within `window_s`, or until there are `most`, into one group.

    `run_samples(samples)` runs a group in a thread and returns a result for each sample. For one event loop.
    """

    run_samples: Callable[[Sequence[Sample]], Sequence[Result]]
    window_s: float = WINDOW_S
    most: int | None = None
    _open: dict[str, _Group[Sample, Result]] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def result(self, key: str, sample: Sample) -> Result:
        """Return the result of a sample once its group has ended; all calls of the group raise its errors."""
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._close(key, group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        index = len(group.samples)
        group.samples.append(sample)
        if len(group.samples) == self.most:
            del self._open[key]
        # cancelling one call must not cancel its siblings
        return (await asyncio.shield(group.results))[index]

    async def _close(self, key: str, group: _Group[Sample, Result]) -> None:
        await asyncio.sleep(self.window_s)
        if self._open.get(key) is group:
            del self._open[key]
        try:
            group.results.set_result(await asyncio.to_thread(self.run_samples, group.samples))
        except Exception as error:
            group.results.set_exception(error)
            # read here, too: all of the calls may have been cancelled
            group.results.exception()


@dataclass
class RewardsSoFar:
    """The mean reward of a run so far: the neutral reward for a group that failed whole. Thread-safe.

    Before the first score it is 0.0 for all members of such a group, so none has an advantage; after _MOST_BROKEN such
    groups there is none, and the next one is an error.
    """

    _n: int = 0
    _sum: float = 0.0
    _n_broken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def fallback(self) -> float | None:
        """Return the mean, or None if too many groups failed before the first score."""
        with self._lock:
            if self._n:
                return self._sum / self._n
            return 0.0 if self._n_broken < _MOST_BROKEN else None

    def take(self, scored: Sequence[float]) -> None:
        """Add the rewards of a group's scored members."""
        with self._lock:
            self._n += len(scored)
            self._sum += sum(scored)
            self._n_broken += not scored
