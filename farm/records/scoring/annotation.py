"""Annotations that a trainer writes back about rollouts, whole or per token: an advantage, a loss, a mismatch, a
mask."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from farm.records.lending.sandbox_calls import AS_BASE64
from farm.records.packed_array import pack, unpack
from farm.records.request_values import Name, Request

MOST_ANNOTATIONS = 10_000
"""Limit of one call."""
_MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Annotation:
    """An annotation of a rollout, or of its training row `row`: one `value`, or `tokens`, float32 [n_response].

    `producer` wrote it at its `step`; `created_at` is in seconds since 1970.
    """

    rollout_id: str
    name: str
    producer: str
    step: int
    value: float | None = None
    row: int | None = None
    tokens: NDArray[np.float32] | None = None
    created_at: float = 0.0


def _tokens(value: Any) -> Any:
    """Return the array given as a base64 packed array or as a list of numbers. Raises ValueError."""
    if isinstance(value, str):
        value = unpack(b64decode(value, validate=True))
    if not isinstance(value, np.ndarray | Sequence):
        raise ValueError("must be a list of numbers, or a packed array in base64")
    try:
        wide = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be a list of numbers, or a packed array in base64") from None
    if wide.ndim != 1 or len(wide) > _MAX_TOKENS:
        raise ValueError(f"must have one dimension, and at most {_MAX_TOKENS} numbers")
    if (np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)).any():
        raise ValueError("must be numbers in the range of float32")
    return wide.astype(np.float32)


_Tokens = Annotated[
    Any,
    BeforeValidator(_tokens),
    PlainSerializer(lambda array: b64encode(pack(array)).decode(), return_type=str),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", **AS_BASE64}]}),
]
_Label = Annotated[Name, Field(min_length=1, max_length=64)]


def _finite(value: float) -> float:
    if not np.isfinite(value):
        raise ValueError("must be finite: leave out other values, or write them as those of tokens")
    return value


class NewAnnotation(Request):
    """An annotation to write: a `value` of the rollout or of a training row, or `tokens` of a row."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    rollout_id: Annotated[Name, Field(min_length=1, max_length=64)]
    name: _Label
    value: Annotated[float, AfterValidator(_finite)] | None = None
    row: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    tokens: _Tokens | None = None
    """A number for each token of the row's response, sampled or not."""

    @model_validator(mode="after")
    def _is_one_figure(self) -> NewAnnotation:
        if (self.value is None) == (self.tokens is None):
            raise ValueError("needs either a `value` or `tokens`")
        if self.tokens is not None and self.row is None:
            raise ValueError("`tokens` need a `row`, counted from 0")
        return self


class NewAnnotations(Request):
    """Annotations of one step of a producer. Safe to write again."""

    producer: _Label
    step: Annotated[int, Field(ge=0, le=2**31 - 1)]
    annotations: Annotated[tuple[NewAnnotation, ...], Field(min_length=1, max_length=MOST_ANNOTATIONS)]
