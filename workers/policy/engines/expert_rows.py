"""Parsing and validation of routed experts: one row for each token that was an input of the model.

vLLM sends a numpy array, [rows, layers, experts]. SGLang sends the int32 values of all rows without a shape: the number
of experts per token and layer must be known. prime-rl's server, a modified vLLM, sends an object. All omit the tokens
before the requested position, and the last sampled token, which was not an input.
"""

from __future__ import annotations

import binascii
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farm.records.experts.routed_experts import CallExperts, ExpertIds
from workers.policy.generation import ExpertRange

MAX_LAYERS = 256
"""Several times the number of layers of any published model."""
_DTYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4"}
_MAX_EXPERT = int(np.iinfo(np.uint16).max)
FLAG = "--enable-return-routed-experts"


class AnotherTopK(ValueError):
    """The model uses another number of experts per token than the request states: not the engine's fault."""


def most_expert_bytes(n_prompt_bytes: int, max_tokens: int, wanted: ExpertRange) -> int:
    """Return the maximum bytes of the experts in an answer: base64 of int32, at most MAX_LAYERS layers per token.

    A token of the prompt was sent in two bytes or more.
    """
    n_tokens = n_prompt_bytes // 2 + 1 - wanted.start + max_tokens
    return n_tokens * MAX_LAYERS * wanted.top_k * 16 // 3


def from_npy(found: Any) -> NDArray[Any]:
    """Return the array of vLLM, or of prime-rl's server. Raises ValueError for anything else."""
    try:
        if isinstance(found, dict):
            dtype = _DTYPES[found["dtype"]]
            return np.frombuffer(_bytes(found["data"]), dtype).reshape(found["shape"])
        array: NDArray[Any] = np.load(io.BytesIO(_bytes(found)), allow_pickle=False)
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


def expert_rows(found: NDArray[Any], wanted: ExpertRange, n_tokens: int) -> CallExperts:
    """Return the experts of a prompt and answer of `n_tokens`, from the requested position to the last token but one.

    Raises ValueError for another number of rows, layers or experts, and for values that are not expert numbers.
    """
    if found.dtype.kind not in "iu" or found.ndim not in (1, 3):
        raise ValueError(f"routed_experts of {found.dtype} in {found.ndim} dimensions")
    n_rows = n_tokens - 1 - wanted.start
    if found.ndim == 1:
        found = _in_rows(found, n_rows, wanted.top_k)
    if len(found) != n_rows:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(found)} rows, but {n_rows} tokens from position {wanted.start} on "
            "were inputs"
        )
    if found.shape[2] != wanted.top_k:
        raise AnotherTopK(
            f"routed_experts has {found.shape[2]} experts per token, but sampling.routed_experts is {wanted.top_k}"
        )
    if found.shape[1] != (wanted.n_layers or found.shape[1]) or not 0 < found.shape[1] <= MAX_LAYERS:
        raise ValueError(f"routed_experts has {found.shape[1]} layers, but earlier calls had {wanted.n_layers}")
    if found.min() < 0 or found.max() > _MAX_EXPERT:
        raise ValueError(f"routed_experts from {found.min()} to {found.max()} are not expert numbers")
    return CallExperts.of(wanted.start, _narrow(found))


def _in_rows(found: NDArray[Any], n_rows: int, top_k: int) -> NDArray[Any]:
    n_layers, rest = divmod(len(found), n_rows * top_k)
    if rest or not n_layers:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(found)} numbers, which do not fit {n_rows} rows of input tokens "
            f"with sampling.routed_experts {top_k}"
        )
    return found.reshape(n_rows, n_layers, top_k)


def _narrow(found: NDArray[Any]) -> ExpertIds:
    if found.max() <= np.iinfo(np.uint8).max:
        return found.astype(np.uint8)
    return found.astype(np.uint16)
