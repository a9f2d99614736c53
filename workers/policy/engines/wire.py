"""What a token-in wire is: how a request is written, and how what comes back is taken in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from farm.request import SamplingParams
from farm.trajectory import TokenIds
from workers.policy.engines.intake import Intake


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prompt_json` is the ids as JSON, written once: they are most of the body, and come back."""

    prompt_json: bytes
    sampling: SamplingParams
    max_tokens: int
    model: str
    stream: bool

    @property
    def prompt(self) -> orjson.Fragment:
        return orjson.Fragment(self.prompt_json)


class Wire(Protocol):
    """One server's way to take ids and give ids; stateless."""

    path: str

    def body(self, ask: Ask) -> dict[str, Any]: ...

    def take(self, event: dict[str, Any], intake: Intake) -> list[int]:
        """Add an answer, or one event of a stream, and return the ids that are new.

        Raises KeyError, IndexError, TypeError, ValueError or AttributeError if it is no such thing.
        """
        ...


def prompt_json(ids: TokenIds) -> bytes:
    """Under a millisecond for 64k ids, where a list of them would cost several."""
    return orjson.dumps(np.ascontiguousarray(ids, dtype=np.int32), option=orjson.OPT_SERIALIZE_NUMPY)


def sampling_fields(sampling: SamplingParams, **names: str) -> dict[str, Any]:
    """The parameters that are set, under the wire's names where these are others (`seed="sampling_seed"`)."""
    fields = {
        names.get(name, name): getattr(sampling, name)
        for name in ("temperature", "top_p", "top_k", "seed")
        if getattr(sampling, name) is not None
    }
    return fields | ({"stop": list(sampling.stop)} if sampling.stop else {})
