"""Rollouts constructed without a farm, of every kind that an adapter may receive, to test its promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import numpy as np

from farm.ids import RolloutRef
from farm.records.rollout import Failure, Outcome, Rollout, Stage, State
from farm.records.trajectory import NO_VERSION, Message, ModelCall, Segment, VersionSpan, token_ids

_USER: Message = {"role": "user", "content": "Go on."}
_ANSWER: Message = {"role": "assistant", "content": "I do."}

BATCH = "constructed"
N_SAMPLES = 2
LONG = 4_096
"""The tokens of the longest response."""
OBSERVED = 0
"""In place of a version: a token that was not sampled."""


def calls_of(rollout: Rollout) -> tuple[ModelCall, ...]:
    """Return calls whose `segments` are those of the rollout with any sampled token."""
    numbers = count()
    return tuple(call for segment in rollout.segments for call in _calls(segment, numbers))


def _calls(segment: Segment, numbers: Iterator[int]) -> Iterator[ModelCall]:
    whole = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    start = len(segment.prompt_ids)
    for begin, end in _stretches(segment.response_mask.tolist()):
        index = next(numbers)
        yield ModelCall(
            index=index,
            # each conversation begins with this message, so each row is one
            messages=[_USER] if begin == 0 else [],
            observations=[_USER] if end < len(segment.response_mask) else [],
            response=_ANSWER,
            finish_reason="stop",
            engine="http://constructed/v1",
            started_at=float(index + 1),
            latency_s=0.5,
            n_prompt_tokens=start + begin,
            n_response_tokens=end - begin,
            prompt_ids=token_ids(whole[: start + begin]),
            response_ids=token_ids(whole[start + begin : start + end]),
            response_logprobs=segment.response_logprobs[begin:end].copy(),
            versions=tuple(_spans(segment.policy_versions[begin:end].tolist())),
            mismatch=segment.mismatch if begin == 0 else None,
        )


def _stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each sampled stretch."""
    begin = 0
    for value, members in groupby(mask):
        end = begin + len(list(members))
        if value:
            yield begin, end
        begin = end


def _spans(versions: Sequence[int]) -> Iterator[VersionSpan]:
    begin = 0
    for version, members in groupby(versions):
        end = begin + len(list(members))
        if version != NO_VERSION:
            yield VersionSpan(str(version), begin, end)
        begin = end


def segment(n_prompt: int, versions: Sequence[int], mismatch: int | None = None, first_id: int = 100) -> Segment:
    """Return a row whose tokens were sampled by these weights, one for each; OBSERVED for a token that was not sampled.

    NO_VERSION means unknown weights. Nearby tokens differ, and so do log-probabilities.
    """
    n = len(versions)
    mask = np.array([version != OBSERVED for version in versions], np.uint8)
    return Segment(
        token_ids(range(first_id, first_id + n_prompt)),
        token_ids(range(first_id + 1_000, first_id + 1_000 + n)),
        mask,
        (mask * np.linspace(-3, -1e-6, n)).astype(np.float32),
        np.where(mask == 1, np.array(versions), NO_VERSION).astype(np.int32),
        mismatch,
    )


def rollout(number: int, segments: Sequence[Segment], **changed: Any) -> Rollout:
    """Return the rollout with this number, in groups of N_SAMPLES: completed and scored, unless `changed`."""
    group, sample = divmod(number, N_SAMPLES)
    complete = Rollout(
        rollout_id=str(RolloutRef(BATCH, group, sample)),
        batch_id=BATCH,
        group_index=group,
        sample_index=sample,
        data_source="noop",
        instance_id=f"instance-{group}",
        stage=Stage.EVAL,
        state=State.COMPLETED,
        attempt=1,
        node=None,
        outcome=Outcome.SUBMITTED,
        reward=0.25 * number - 0.5,
        failure=None,
        n_turns=1,
        n_response_tokens=sum(int(each.response_mask.sum()) for each in segments),
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=number + 1,
        segments=tuple(segments),
        n_segments=len(segments),
    )
    return replace(complete, **changed)


def broken(number: int, outcome: Outcome, segments: Sequence[Segment]) -> Rollout:
    """Return a rollout that failed or was cancelled: no reward, and the rows recorded so far."""
    cancelled = outcome is Outcome.CANCELLED
    state, failure = (State.CANCELLED, None) if cancelled else (State.FAILED, Failure(str(outcome), "constructed"))
    return rollout(number, segments, outcome=outcome, state=state, reward=None, failure=failure)


def every_kind(n_long: int = LONG) -> list[Rollout]:
    """Return whole groups of rollouts of every kind; the longest response has `n_long` tokens."""
    return [
        rollout(0, [segment(2, [7, 7, 7])]),
        # branched: several rows, one of two versions
        rollout(1, [segment(3, [7, 7]), segment(4, [7, OBSERVED, OBSERVED, 8, 8], first_id=200), segment(1, [8])]),
        # a zero earned by the policy
        rollout(2, [segment(2, [7])], reward=0.0, outcome=Outcome.DEADLINE),
        broken(3, Outcome.ENGINE_ERROR, [segment(2, [7])]),
        broken(4, Outcome.CANCELLED, [segment(2, [7])]),
        # an engine saw other tokens; nothing was sampled; and a row that may train
        rollout(5, [segment(2, [7, 7], mismatch=3), segment(2, [OBSERVED] * 2), segment(9, [6, 7], first_id=300)]),
        # ended before its first token
        rollout(6, [], outcome=Outcome.DEADLINE),
        rollout(7, [segment(2, [NO_VERSION, 7])]),
        # dropped as stale: an earlier score does not count
        rollout(8, [segment(2, [7])], reward=1.0, outcome=Outcome.STALE, state=State.FAILED),
        # untrusted as a whole
        rollout(9, [segment(2, [7, 7], mismatch=2)]),
        rollout(10, [segment(n_long // 8, [7, OBSERVED, 8, 9] * (n_long // 4))], outcome=Outcome.CONTEXT_FULL),
        rollout(11, [segment(1, [9])], outcome=Outcome.INVALID_ACTION),
    ]


def only_broken() -> list[Rollout]:
    """Return rollouts of which none may train."""
    outcomes = [each for each in Outcome if each not in {Outcome.STALE}]
    ours = [each for each in outcomes if not rollout(0, [], outcome=each).trainable]
    return [broken(number, outcome, [segment(2, [7, 7])]) for number, outcome in enumerate(ours)]
