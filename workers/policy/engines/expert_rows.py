"""Routed experts as engines write them, and their check: one row for each token that was an input of the model.

vLLM writes an array of numpy, [rows, layers, experts], SGLang the int32 of all rows back to back: how many experts a
layer uses for a token has to be known there. prime-rl's server, a vLLM of its own, writes an object. All leave out the
tokens before the one that was asked for, and the last that was sampled, which was no input.
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
"""Of a model: several times those of any published one."""
_DTYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4"}
_MAX_EXPERT = int(np.iinfo(np.uint16).max)
FLAG = "--enable-return-routed-experts"


class AnotherTopK(ValueError):
    """The model uses another number of experts for a token than the request says: that is not the engine's fault."""


def most_expert_bytes(n_prompt_bytes: int, max_tokens: int, wanted: ExpertRange) -> int:
    """Return the most bytes of the experts in an answer: int32 in base64 of at most MAX_LAYERS layers, for each token.

    A token of the prompt was sent in two bytes or more.
    """
    n_tokens = n_prompt_bytes // 2 + 1 - wanted.start + max_tokens
    return n_tokens * MAX_LAYERS * wanted.top_k * 16 // 3


def from_npy(found: Any) -> NDArray[Any]:
    """Return the array of vLLM, or of prime-rl's. Raises ValueError for what is none."""
    try:
        if isinstance(found, dict):
            dtype = _DTYPES[found["dtype"]]
            return np.frombuffer(_bytes(found["data"]), dtype).reshape(found["shape"])
        array: NDArray[Any] = np.load(io.BytesIO(_bytes(found)), allow_pickle=False)
    except (ValueError, EOFError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"routed_experts that are no array: {error}") from None
    return array


def from_int32(text: Any) -> NDArray[Any]:
    """Return the numbers of SGLang. Raises ValueError for what are none."""
    return np.frombuffer(_bytes(text), "<i4")


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("routed_experts that are no text")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"routed_experts that are no base64: {error}") from None


def expert_rows(found: NDArray[Any], wanted: ExpertRange, n_tokens: int) -> CallExperts:
    """Return the experts of a prompt and answer of `n_tokens`, from the first that was asked for to the last but one.

    Raises ValueError for another number of rows, layers or experts of a token, and for what are no experts.
    """
    if found.dtype.kind not in "iu" or found.ndim not in (1, 3):
        raise ValueError(f"routed_experts of {found.dtype} in {found.ndim} dimensions")
    n_rows = n_tokens - 1 - wanted.start
    if found.ndim == 1:
        found = _in_rows(found, n_rows, wanted.top_k)
    if len(found) != n_rows:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(found)} rows, and {n_rows} tokens from position {wanted.start} on "
            "were an input"
        )
    if found.shape[2] != wanted.top_k:
        raise AnotherTopK(
            f"routed_experts has {found.shape[2]} of a token, and sampling.routed_experts is {wanted.top_k}"
        )
    if found.shape[1] != (wanted.n_layers or found.shape[1]) or not 0 < found.shape[1] <= MAX_LAYERS:
        raise ValueError(f"routed_experts of {found.shape[1]} layers, where calls before had {wanted.n_layers}")
    if found.min() < 0 or found.max() > _MAX_EXPERT:
        raise ValueError(f"routed_experts from {found.min()} to {found.max()} are no numbers of experts")
    return CallExperts.of(wanted.start, _narrow(found))


def _in_rows(found: NDArray[Any], n_rows: int, top_k: int) -> NDArray[Any]:
    n_layers, rest = divmod(len(found), n_rows * top_k)
    if rest or not n_layers:
        raise ValueError(
            f"routed_experts (with {FLAG}) has {len(found)} numbers, which are no rows of {n_rows} tokens that were an "
            f"input with sampling.routed_experts {top_k}"
        )
    return found.reshape(n_rows, n_layers, top_k)


def _narrow(found: NDArray[Any]) -> ExpertIds:
    if found.max() <= np.iinfo(np.uint8).max:
        return found.astype(np.uint8)
    return found.astype(np.uint16)
