"""The interface of a token-in wire: writing a request, and parsing its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import orjson

from farm.records.request import SamplingParams
from farm.records.trajectory import TokenIds
from workers.policy.engines.generation_builder import GenerationBuilder
from workers.policy.generation import ExpertRange

SHORT_SEED = 2**31 - 1
"""The bit mask of seeds for servers other than vLLM."""
_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
SHAPE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""The errors of parsing an answer that does not have the wire's form."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request. `prompt_json` is the ids as JSON, encoded once: they are most of the body, and are echoed.

    `experts` are the routed experts to return; None for none.
    """

    prompt_json: bytes
    sampling: SamplingParams
    max_tokens: int
    model: str
    stream: bool
    experts: ExpertRange | None = None

    @property
    def prompt(self) -> orjson.Fragment:
        return orjson.Fragment(self.prompt_json)


class Wire(Protocol):
    """The protocol of one server for ids in and ids out; stateless. Derived classes inherit the defaults."""

    name: ClassVar[str]
    """Its name in `EngineInfo.token_in`, unique within its kind of server."""
    path: ClassVar[str]
    """The route that requests are posted to."""
    advice: ClassVar[str]
    """A remark for the operator of a server that does not accept token ids on this wire."""
    always_streams: ClassVar[bool] = False
    """True if even whole answers are sent as streams."""
    takes_guides: ClassVar[bool] = False
    """True if it supports the guide of a FormedSampling."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """Fields of SamplingParams that the server does not support; a call that sets one is refused."""
    streams_experts: ClassVar[bool] = True
    """False if its streams lack `routed_experts`, unlike whole answers."""
    ends_with_done: ClassVar[bool] = True
    """True if a stream ends with `[DONE]`; otherwise only its finish reason shows that it is complete."""

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        """Return the JSON body of a request."""
        ...

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        """Add an answer, or one event of a stream, and return the new ids.

        Raises KeyError, IndexError, TypeError, ValueError or AttributeError if it is invalid, and Refusal for an error
        that came too late for an HTTP status.
        """
        ...


def prompt_json(ids: TokenIds) -> bytes:
    """Return the ids as JSON: under a millisecond for 64k of them, where a list would take several."""
    return orjson.dumps(np.ascontiguousarray(ids, dtype=np.int32), option=orjson.OPT_SERIALIZE_NUMPY)


def sampling_fields(sampling: SamplingParams, max_tokens: int, **names: str) -> dict[str, Any]:
    """Return the parameters that are set, except `max_tokens` and the cache salt.

    `names` are the wire's names that differ (`seed="sampling_seed"`).
    """
    fields = {name: getattr(sampling, name) for name in _FIELDS if getattr(sampling, name) is not None}
    if sampling.min_tokens:
        # Engines refuse a value above `max_tokens`, which the rollout's limits lower.
        fields["min_tokens"] = min(sampling.min_tokens, max_tokens)
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return {names.get(name, name): value for name, value in fields.items()}


def salted(sampling: SamplingParams, name: str = "cache_salt") -> dict[str, Any]:
    """Return the prefix cache's salt under the request's name for it; empty if there is none."""
    return {name: sampling.cache_salt} if sampling.cache_salt else {}
