"""The sampling request, whichever protocol it came by; and the refusals of requests that cannot be met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from farm.errors import FarmError
from farm.records.trajectory import TokenIds

RequestT = TypeVar("RequestT", bound=BaseModel)


class RequestRefused(FarmError):
    """The request is answered with this status and error."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One prompt, sampled `n` times. `max_tokens` None is all the room there is; `seed` None lets the player choose."""

    request_id: str
    prompt: TokenIds
    max_tokens: int | None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    salt: str = ""

    def seed_of(self, index: int) -> int | None:
        return None if self.seed is None else self.seed + index


def parsed(model: type[RequestT], body: Any) -> RequestT:
    """The request, as vLLM refuses it if it is none."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        lines = [f"  { ({**one, 'loc': _place(one)}) }" for one in errors]
        plural = "s" if len(errors) > 1 else ""
        message = "\n".join([f"{len(errors)} validation error{plural}:", *lines])
        raise RequestRefused(message, kind="Bad Request", param=_place(errors[0])) from None


def _place(error: Any) -> str:
    return ".".join(["body", *map(str, error["loc"])])


def ids_of(values: Any, size: int, refusal: str = "Token id {id} is out of vocabulary") -> TokenIds:
    """A list of token ids. Raises RequestRefused for what is none, and for ids beyond the vocabulary's size."""
    try:
        ids = np.array(values)
    except ValueError:
        ids = np.array(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise RequestRefused("token ids are a flat list of integers")
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if len(wrong):
        raise RequestRefused(refusal.format(id=ids[wrong[0]], size=size))
    return ids.astype(np.int32)
