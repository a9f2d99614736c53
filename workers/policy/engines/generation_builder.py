"""Validation of an engine's generation, for all wires, which pass on the raw values as received.

The rule: an answer counts only if each of its values has the wire's type, is in the range that the request allows, and
is consistent with the others. Ids are within the vocabulary and at most as many as requested; there is at least one
unless the answer was aborted. Each id has one finite log-probability of at most 0; the finish reason is a known one;
versions and counts can be stored. Any other answer is the engine's fault: the call fails and is retried, on another
engine if possible. No value is repaired, as a trajectory with a guessed value trains on tokens that were never sampled.

Routed experts are one row for each token that was an input of the model. vLLM sends a numpy array, [rows, layers,
experts]. SGLang sends the int32 values of all rows without a shape: the number of experts per token and layer must be
known. prime-rl's server, a modified vLLM, sends an object. All omit the tokens before the requested position, and the
last sampled token, which was not an input.
"""

from __future__ import annotations

import binascii
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farm.records.experts.routed_experts import CallExperts, ExpertIds
from farm.records.trajectory import LogProbs, TokenIds, VersionSpan, token_ids
from workers.policy.generation import ExpertRange, Generation

MAX_LAYERS = 256
"""Several times the number of layers of any published model."""
_DTYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4"}
_MAX_EXPERT = int(np.iinfo(np.uint16).max)
FLAG = "--enable-return-routed-experts"
MAX_VOCABULARY = 2**22
"""The bound of ids if the tokenizer is unknown: several times the vocabulary of any published model."""
FINISH_REASONS = frozenset(("stop", "length", "abort", "repetition", "tool_calls", "function_call", "content_filter"))
"""The valid finish reasons. vLLM's `error` is not valid: the tokens before it are unreliable."""
VERSION_CHARS = 64
_LARGEST = 2**31 - 1
_UNKNOWN = -9999.0
"""vLLM's value for an unknown log-probability."""
_ROUNDING = 1e-4
"""The rounding error by which a log-probability may exceed 0; it then counts as 0."""
_ECHO = b'"prompt_token_ids":'
_NUMBERS = {int, float}
_NEGATIVE = re.compile(r"\s*-\s*[0-9]")


class AnotherTopK(ValueError):
    """The model uses another number of experts per token than the request states: not the engine's fault."""


def most_expert_bytes(n_prompt_bytes: int, max_tokens: int, requested: ExpertRange) -> int:
    """Return the maximum bytes of the experts in an answer: base64 of int32, at most MAX_LAYERS layers per token.

    A token of the prompt was sent in two bytes or more.
    """
    n_tokens = n_prompt_bytes // 2 + 1 - requested.start + max_tokens
    return n_tokens * MAX_LAYERS * requested.top_k * 16 // 3


def from_npy(value: Any) -> NDArray[Any]:
    """Return the array of vLLM, or of prime-rl's server. Raises ValueError for anything else."""
    try:
        if isinstance(value, dict):
            dtype = _DTYPES[value["dtype"]]
            return np.frombuffer(_bytes(value["data"]), dtype).reshape(value["shape"])
        array: NDArray[Any] = np.load(io.BytesIO(_bytes(value)), allow_pickle=False)
    except (ValueError, EOFError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"routed_experts is not an array: {error}") from None
    return array


def from_int32(text: Any) -> NDArray[Any]:
    """Return SGLang's numbers. Raises ValueError for anything else."""
    return np.frombuffer(_bytes(text), "<i4")


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("routed_experts is not a text")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"routed_experts is not base64: {error}") from None


def expert_rows(experts: NDArray[Any], requested: ExpertRange, n_tokens: int) -> CallExperts:
    """Return the experts of a prompt and answer of `n_tokens`, from the requested position to the last token but one.

    Raises ValueError for another number of rows, layers or experts, and for values that are not expert numbers.
    """
    if experts.dtype.kind not in "iu" or experts.ndim not in (1, 3):
        raise ValueError(f"routed_experts of {experts.dtype} in {experts.ndim} dimensions")
    n_rows = n_tokens - 1 - requested.start
    if experts.ndim == 1:
        experts = _in_rows(experts, n_rows, requested.top_k)
    if len(experts) != n_rows:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(experts)} rows, but {n_rows} tokens from position "
            f"{requested.start} on were inputs"
        )
    if experts.shape[2] != requested.top_k:
        raise AnotherTopK(
            f"routed_experts has {experts.shape[2]} experts per token, but sampling.routed_experts is {requested.top_k}"
        )
    if experts.shape[1] != (requested.n_layers or experts.shape[1]) or not 0 < experts.shape[1] <= MAX_LAYERS:
        raise ValueError(f"routed_experts has {experts.shape[1]} layers, but earlier calls had {requested.n_layers}")
    if experts.min() < 0 or experts.max() > _MAX_EXPERT:
        raise ValueError(f"routed_experts from {experts.min()} to {experts.max()} are not expert numbers")
    return CallExperts.of(requested.start, _narrow(experts))


def _in_rows(numbers: NDArray[Any], n_rows: int, top_k: int) -> NDArray[Any]:
    n_layers, rest = divmod(len(numbers), n_rows * top_k)
    if rest or not n_layers:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(numbers)} numbers, which do not fit {n_rows} rows of input tokens "
            f"with sampling.routed_experts {top_k}"
        )
    return numbers.reshape(n_rows, n_layers, top_k)


def _narrow(experts: NDArray[Any]) -> ExpertIds:
    if experts.max() <= np.iinfo(np.uint8).max:
        return experts.astype(np.uint8)
    return experts.astype(np.uint16)


class GenerationBuilder:
    """One generation while it is received: whole, or in pieces.

    `max_tokens` and `n_vocabulary` are the bounds of its ids; None if unknown. `experts` are the requested ones.
    """

    def __init__(
        self,
        prompt_ids: TokenIds,
        max_tokens: int | None = None,
        n_vocabulary: int | None = None,
        experts: ExpertRange | None = None,
    ) -> None:
        self._sent = prompt_ids
        self._wanted_experts = experts
        self._experts: NDArray[Any] | None = None
        self._max_tokens = max_tokens
        self._n_vocabulary = n_vocabulary or MAX_VOCABULARY
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.logprob_ids: list[int] = []
        """The ids to which the log-probabilities belong, if the wire sends them."""
        self.finish_reason: Any = None
        self.stop_reason: Any = None
        self.prompt_ids: TokenIds | None = None
        self.versions: tuple[VersionSpan, ...] = ()
        self.n_cached_tokens: Any = None
        self.n_counted: Any = None
        """Number of sampled tokens that the engine reports."""

    @property
    def is_full(self) -> bool:
        """True if there are as many ids as were requested."""
        return self._max_tokens is not None and len(self.ids) >= self._max_tokens

    def saw(self, prompt: Any, *, as_sent: bool = False) -> None:
        """Set the prompt that the engine reports; `as_sent`: it equals the ids that were sent (see `without_echo`)."""
        if as_sent:
            self.prompt_ids = self._sent
        elif prompt is not None and prompt != []:
            self.prompt_ids = token_ids(self._natural(prompt))

    def add(self, ids: Any, logprobs: Any, logprob_ids: list[Any] | None = None) -> list[int]:
        """Append sampled ids and log-probabilities; return the ids. Raises ValueError for other or too many values."""
        new_ids = self._natural([] if ids is None else ids)
        self.ids += new_ids
        self.logprobs += _numbers([] if logprobs is None else logprobs)
        # Not validated by themselves: they must equal the ids, which are.
        self.logprob_ids += logprob_ids or []
        if self._max_tokens is not None and len(self.ids) > self._max_tokens:
            raise ValueError(f"{len(self.ids)} token ids, but only {self._max_tokens} were requested")
        return new_ids

    def end(self, finish_reason: Any, stop_reason: Any = None) -> None:
        """Set the finish reason and the stop reason, if this piece has them."""
        self.finish_reason = self.finish_reason if finish_reason is None else finish_reason
        self.stop_reason = self.stop_reason if stop_reason is None else stop_reason

    def spans(self, reported: Any) -> None:
        """Set the versions of the weights from `[{version, start, end}]`."""
        if reported:
            self.versions = tuple(
                VersionSpan(version(span["version"]), count(span["start"]), count(span["end"])) for span in reported
            )

    def take_experts(self, value: Any, reader: Callable[[Any], NDArray[Any]]) -> None:
        """Set the routed experts, if they were requested and are in this piece. Raises ValueError."""
        if value is not None and self._wanted_experts is not None:
            self._experts = reader(value)

    def generation(self) -> Generation:
        """Return the generation. Raises ValueError if its values are inconsistent."""
        reason = finish_reason(self.finish_reason)
        ids, logprobs = token_ids(self.ids), _logprobs(self.logprobs)
        if self.n_counted is None:
            raise ValueError("no count of the sampled tokens")
        if not len(ids) == len(logprobs) == count(self.n_counted):
            raise ValueError(
                f"{len(ids)} token ids, {len(logprobs)} log-probabilities, {self.n_counted} tokens counted"
            )
        if not len(ids) and reason != "abort":
            raise ValueError(f"no token ids, but finish reason {reason!r}")
        if self.logprob_ids and self.logprob_ids != self.ids:
            raise ValueError("the log-probabilities are of other tokens than those sampled")
        _covering(self.versions, len(ids))
        cached = None if self.n_cached_tokens is None else count(self.n_cached_tokens)
        if cached is not None and cached > len(self._sent) + len(ids):
            raise ValueError(f"{cached} tokens cached of {len(self._sent)}")
        return Generation(
            response_ids=ids,
            response_logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason(self.stop_reason),
            prompt_ids=self.prompt_ids,
            versions=self.versions,
            n_cached_tokens=cached,
            routed_experts=self._routed_experts(len(ids)),
        )

    def _routed_experts(self, n_sampled: int) -> CallExperts | None:
        # The experts of a call aborted before any token was sampled arrive with the call that continues it.
        if self._experts is None or self._wanted_experts is None or not n_sampled:
            return None
        return expert_rows(self._experts, self._wanted_experts, len(self._sent) + n_sampled)

    def _natural(self, values: Any) -> list[int]:
        if type(values) is not list or not set(map(type, values)) <= {int}:
            raise ValueError("token ids that are not natural numbers")
        if values and (min(values) < 0 or max(values) >= self._n_vocabulary):
            wrong = next(value for value in values if not 0 <= value < self._n_vocabulary)
            raise ValueError(f"token id {wrong} is not among the {self._n_vocabulary} ids of its vocabulary")
        return values


def finish_reason(value: Any) -> str:
    """Return the finish reason. Raises ValueError if it is missing or unknown."""
    if value is None or value == "":
        raise ValueError("no finish reason")
    if value == "error":
        raise ValueError("the engine broke off the generation")
    if not isinstance(value, str) or value not in FINISH_REASONS:
        raise ValueError(f"finish reason {_shown(value)} is not one of {', '.join(sorted(FINISH_REASONS))}")
    return value


def stop_reason(value: Any) -> str | int | None:
    """Return the stop string or stop token that ended it, if any. Raises ValueError for anything else."""
    if value is None or isinstance(value, str) or (type(value) is int and abs(value) <= _LARGEST):
        return value
    raise ValueError(f"stop reason {_shown(value)} is neither a string nor a token")


def version(value: Any) -> str:
    """Return the version of an engine's weights; empty if it gives none. Raises ValueError for an invalid one."""
    if value is None:
        return ""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or len(text) > VERSION_CHARS or not text.isprintable() or _NEGATIVE.match(text):
        raise ValueError(f"version {_shown(value)} of the weights is not 0 to {VERSION_CHARS} printable characters")
    return text


def count(value: Any) -> int:
    """Return a number of tokens. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{_shown(value)} is not a number of tokens")
    return value


def without_echo(content: bytes, sent: bytes) -> bytes | None:
    """Return the answer with `null` in place of a prompt whose JSON equals the one sent, byte for byte.

    None if it differs, even in whitespace; then it has to be parsed. Comparing bytes takes microseconds, while parsing
    64k numbers takes milliseconds.
    """
    at = content.find(_ECHO)
    start = at + len(_ECHO)
    end = start + len(sent)
    if at < 0 or not content.startswith(sent, start):
        return None
    return b"".join((content[:start], b"null", content[end:]))


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _numbers(values: Any) -> list[float]:
    if type(values) is not list or not set(map(type, values)) <= _NUMBERS:
        raise ValueError("log-probabilities that are unknown, above 0 or not numbers")
    return values


def _logprobs(values: Sequence[float]) -> LogProbs:
    try:
        logprobs = np.asarray(values, dtype=np.float64)
    except OverflowError:
        raise ValueError("log-probabilities that are unknown or above 0") from None
    if not np.all((logprobs <= _ROUNDING) & (logprobs > _UNKNOWN)):
        raise ValueError("log-probabilities that are unknown or above 0")
    return np.minimum(logprobs, 0.0).astype(np.float32)


def _covering(versions: Sequence[VersionSpan], n: int) -> None:
    """Raise ValueError unless the spans, if there are any, follow each other from 0 to n."""
    at = 0
    for span in versions:
        if span.start != at or span.end < span.start:
            raise ValueError(f"weight versions that leave a gap at token {at}")
        at = span.end
    if versions and at != n:
        raise ValueError(f"weight versions for {at} of {n} tokens")
