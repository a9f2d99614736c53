"""The sampling request in a common form of all protocols, and refusals of invalid requests."""

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
    """One prompt, sampled `n` times. `max_tokens` None means no limit; `seed` None leaves it to the source of turns."""

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
    """Return the request. Raises RequestRefused, worded like vLLM, for an invalid one."""
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
    """Return a list of token ids. Raises RequestRefused for other values, and for ids outside the vocabulary."""
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
