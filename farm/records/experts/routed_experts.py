"""The experts that tokens were routed to, as recorded by an engine, for model calls and for training rows.

A mixture-of-experts model sends each token, in each layer, to `top_k` of its experts. The engine records them when the
token is an input of the model; so the last token sampled by a call has none until a later call has it in its prompt.
Row i of an array belongs to the token at position i of prompt and response, not to the token sampled after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ExpertIds: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""uint8, or uint16 for a model with more than 256 experts."""


@dataclass(frozen=True, slots=True)
class CallExperts:
    """The experts of the positions [start, end) of a call's prompt and response: `ids` [end - start, n_layers, top_k].

    `ids` is None once they are written to the store, next to the call.
    """

    start: int
    end: int
    ids: ExpertIds | None

    @classmethod
    def of(cls, start: int, ids: ExpertIds) -> CallExperts:
        return cls(start, start + len(ids), ids)

    def stored(self) -> CallExperts:
        """Return it without the array."""
        return replace(self, ids=None)

    def then(self, after: CallExperts) -> CallExperts:
        """Return both joined. Raises ValueError unless `after` continues where this ends, for the same layers."""
        assert self.ids is not None
        assert after.ids is not None
        if self.end != after.start or self.ids.shape[1:] != after.ids.shape[1:]:
            raise ValueError(
                f"experts of positions {self.start} to {self.end} have the shape {self.ids.shape[1:]}, and those from "
                f"{after.start} on have the shape {after.ids.shape[1:]}"
            )
        return CallExperts(self.start, after.end, np.concatenate([self.ids, after.ids]))


@dataclass(frozen=True, slots=True)
class RowExperts:
    """The experts of a training row, over its prompt and its response, [n].

    `known` is 1 where they were recorded; elsewhere, as at the last sampled token, all expert ids are 0. `flat` has the
    ids back to back; `ids` has them as [n, n_layers, top_k].
    """

    flat: ExpertIds
    n_layers: int
    top_k: int
    known: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.flat) != len(self.known) * self.n_layers * self.top_k:
            raise ValueError(
                f"{len(self.flat)} expert ids of {len(self.known)} tokens, {self.n_layers} layers and {self.top_k} each"
            )

    def __len__(self) -> int:
        return len(self.known)

    @property
    def ids(self) -> ExpertIds:
        return self.flat.reshape(len(self.known), self.n_layers, self.top_k)

    @property
    def first_unknown(self) -> int:
        """The first position without experts; the length if there is none."""
        unknown = np.flatnonzero(self.known == 0)
        return int(unknown[0]) if len(unknown) else len(self.known)

    def cut(self, n_tokens: int) -> RowExperts:
        """Return the experts of the first `n_tokens`."""
        return replace(self, flat=self.flat[: n_tokens * self.n_layers * self.top_k], known=self.known[:n_tokens])
