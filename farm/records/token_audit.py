"""Audit that training rows hold exactly the sampled tokens; runs wherever rows are stored.

It is independent of `farm.records.trajectory.segments`. Every sampled token is identified by all ids up to it, its
log-probability and its version; the tokens of the calls and those trained on in the rows must be the same ones, each
as often. So mask 1 stands exactly on sampled ids with exactly their history, and shared branches train once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farm.records.prefixes import last_hash, prefix_hashes
from farm.records.trajectory import NO_VERSION, LogProbs, ModelCall, Segment, TokenIds, token_versions

_TOKEN = np.dtype([("position", "<u8"), ("history", "<u8"), ("logprob", "<u4"), ("version", "<i4")])
"""A sampled token: the number of ids before it, a hash of these and itself, its log-probability's bits, its version."""


def check(rows: Sequence[Segment], calls: Sequence[ModelCall], *, whole: bool = True) -> None:
    """Raise ValueError, naming the row, unless the rows match the token-exact calls. A mismatch is a bug of the farm.

    Unless `whole`, sampled tokens may be missing.
    """
    for index, row in enumerate(rows):
        if wrong := _wrong(row):
            raise ValueError(f"training row {index}: {wrong}")
    exact = [_Print.of_call(call) for call in calls if call.token_exact]
    prints = [_Print.of_row(row) for row in rows]
    if not whole:
        _check_among(exact, prints)
        return
    _check_tokens(_sorted(exact), _sorted(prints))
    starts, ends = {each.start for each in exact}, {each.end for each in exact}
    for index, each in enumerate(prints):
        if each.start not in starts:
            raise ValueError(f"training row {index}: its prompt is not the prompt of any call")
        if each.end not in ends:
            raise ValueError(f"training row {index}: it does not end where a call ended")


def _check_tokens(sampled: NDArray[np.void], trained: NDArray[np.void]) -> None:
    if len(sampled) != len(trained):
        raise ValueError(f"{len(sampled)} tokens were sampled, and the training rows hold {len(trained)}")
    if not np.array_equal(sampled, trained):
        first = int(np.flatnonzero(sampled != trained)[0])
        raise ValueError(
            f"the training rows hold a token that was not sampled there: {trained[first]} where {sampled[first]} was "
            "(position, hash of the history, bits of the log-probability, version)"
        )


def _check_among(sampled: Sequence[_Print], prints: Sequence[_Print]) -> None:
    sampled_counts = Counter(token.tobytes() for each in sampled for token in each.tokens)
    for index, row in enumerate(prints):
        for token in row.tokens:
            if not sampled_counts[token.tobytes()]:
                raise ValueError(f"training row {index} holds a token that was not sampled there, or more than once")
            sampled_counts[token.tobytes()] -= 1


def _wrong(row: Segment) -> str:
    """Return the first inconsistency within a row; empty without one."""
    sampled = row.response_mask == 1
    put_there = row.response_mask == 0
    if not np.all(sampled | put_there):
        return "its mask is neither 0 nor 1"
    if np.any(row.response_logprobs[put_there] != 0.0):
        return "a token that was not sampled has a log-probability"
    if np.any(row.policy_versions[put_there] != NO_VERSION):
        return "a token that was not sampled has a policy version"
    logprobs = row.response_logprobs[sampled]
    if not np.all(np.isfinite(logprobs) & (logprobs <= 0)):
        return "a log-probability is not a number, or is above 0"
    length = len(row.prompt_ids) + len(row.response_ids)
    if row.mismatch is not None and not 0 <= row.mismatch <= length:
        return f"its mismatch is at {row.mismatch}, and it has {length} tokens"
    return ""


@dataclass(frozen=True, slots=True)
class _Print:
    """The fingerprint of a call or a row: its sampled tokens, and hashes of its prompt and of all its ids."""

    tokens: NDArray[np.void]
    start: tuple[int, int]
    end: tuple[int, int]

    @classmethod
    def of_call(cls, call: ModelCall) -> _Print:
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        positions = np.arange(len(call.response_ids))
        return cls._of(call.prompt_ids, call.response_ids, positions, call.response_logprobs, token_versions(call))

    @classmethod
    def of_row(cls, row: Segment) -> _Print:
        positions = np.flatnonzero(row.response_mask)
        logprobs, versions = row.response_logprobs[positions], row.policy_versions[positions]
        return cls._of(row.prompt_ids, row.response_ids, positions, logprobs, versions)

    @classmethod
    def _of(
        cls, prompt: TokenIds, response: TokenIds, positions: NDArray[np.intp], logprobs: LogProbs, versions: TokenIds
    ) -> _Print:
        hashes = prefix_hashes(np.concatenate([prompt, response]))
        tokens = np.empty(len(positions), _TOKEN)
        tokens["position"] = positions + len(prompt)
        tokens["history"] = hashes[positions + len(prompt)]
        # -0.0 and 0.0 are the same log-probability
        tokens["logprob"] = (logprobs.astype(np.float32) + np.float32(0.0)).view(np.uint32)
        tokens["version"] = versions
        return cls(tokens, _last(hashes[: len(prompt)]), _last(hashes))


def _sorted(prints: Iterable[_Print]) -> NDArray[np.void]:
    return np.sort(np.concatenate([np.empty(0, _TOKEN), *(each.tokens for each in prints)]), order=_TOKEN.names)


def _last(hashes: NDArray[np.uint64]) -> tuple[int, int]:
    return len(hashes), last_hash(hashes)
