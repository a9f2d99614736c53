"""The model calls of constructed rollouts: one for each sampled stretch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, groupby

from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Message, ModelCall, Segment, VersionSpan, token_ids

_USER: Message = {"role": "user", "content": "Go on."}
_ANSWER: Message = {"role": "assistant", "content": "I do."}


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
