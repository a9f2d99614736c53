"""Takes what an engine says of one generation, and lets it pass only if it adds up.

A wrong length or an unknown log-probability is the engine's fault: the call fails and is made again, on another engine
if there is one. Nothing is mended here, as a trajectory with a guess in it trains on what was never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farm.trajectory import LogProbs, TokenIds, VersionSpan, token_ids
from workers.policy.generation import Generation

_UNKNOWN = -9999.0
"""What vLLM writes for a log-probability it does not know."""
_ROUNDING = 1e-4
"""How far above 0 a log-probability may lie by rounding; it is taken as 0."""
_ECHO = b'"prompt_token_ids":'


class Intake:
    """One generation while it comes in: whole, or in pieces."""

    def __init__(self, prompt_ids: TokenIds) -> None:
        self._sent = prompt_ids
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.logprob_ids: list[int] = []
        """The ids that the log-probabilities are said to be of, where the wire tells them."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.prompt_ids: TokenIds | None = None
        self.versions: tuple[VersionSpan, ...] = ()
        self.n_cached_tokens: int | None = None
        self.n_counted: int | None = None
        """How many tokens the engine says it sampled."""

    def saw(self, prompt: list[int] | bool | None) -> None:
        """The prompt as the engine saw it; True stands for the ids that were sent (`without_echo`)."""
        if prompt is True:
            self.prompt_ids = self._sent
        elif prompt:
            self.prompt_ids = _ids(prompt)

    def spans(self, found: Sequence[Mapping[str, Any]] | None) -> None:
        if found:
            self.versions = tuple(VersionSpan(str(span["version"]), span["start"], span["end"]) for span in found)

    def generation(self) -> Generation:
        """Raises ValueError if what came does not add up."""
        if not self.finish_reason:
            raise ValueError("it does not say why the generation ended")
        ids = _ids(self.ids)
        logprobs = _logprobs(self.logprobs)
        _same_length(ids, logprobs, self.n_counted)
        if self.logprob_ids and self.logprob_ids != self.ids:
            raise ValueError("the log-probabilities are of other tokens than those sampled")
        _covering(self.versions, len(ids))
        return Generation(
            response_ids=ids,
            response_logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_ids=self.prompt_ids,
            versions=self.versions,
            n_cached_tokens=self.n_cached_tokens,
        )


def without_echo(content: bytes, sent: bytes) -> bytes:
    """The answer with `true` in place of a prompt that equals the one sent, as its JSON was written.

    Comparing bytes costs microseconds where reading 64k numbers costs milliseconds. A prompt that differs, be it in a
    blank, stays to be read.
    """
    at = content.find(_ECHO)
    start = at + len(_ECHO)
    if at < 0 or not content.startswith(sent, start):
        return content
    return b"".join((content[:start], b"true", content[start + len(sent) :]))


def _ids(values: Sequence[int]) -> TokenIds:
    if not values:
        return token_ids(())
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= 2**31:
        raise ValueError("token ids that are no natural numbers")
    return found.astype(np.int32)


def _logprobs(values: Sequence[float | None]) -> LogProbs:
    found = np.asarray(values, dtype=np.float32)
    if not np.all((found <= _ROUNDING) & (found > _UNKNOWN)):
        raise ValueError("log-probabilities that are unknown or above 0")
    return np.minimum(found, np.float32(0.0))


def _same_length(ids: TokenIds, logprobs: LogProbs, n_counted: int | None) -> None:
    if n_counted is None:
        raise ValueError("it does not count the tokens it sampled")
    if not len(ids) == len(logprobs) == n_counted:
        raise ValueError(f"{len(ids)} token ids, {len(logprobs)} log-probabilities, {n_counted} tokens counted")


def _covering(versions: Sequence[VersionSpan], n: int) -> None:
    """Raises ValueError unless the spans, where there are any, follow each other from 0 to n."""
    at = 0
    for span in versions:
        if span.start != at or span.end < span.start:
            raise ValueError(f"weight versions that leave a gap at token {at}")
        at = span.end
    if versions and at != n:
        raise ValueError(f"weight versions for {at} of {n} tokens")
