"""The base of all request types, and their common value types."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from farm.records.values import size_of

_MAX_EXTRA_BYTES = 1_000_000


def _some_json(value: dict[str, Any]) -> dict[str, Any]:
    size_of(value, _MAX_EXTRA_BYTES)
    return value


def plain(text: str) -> str:
    """Return a text of at most 1 MB that can be stored. Raises ValueError."""
    size_of(text, _MAX_EXTRA_BYTES)
    return text


Json = Annotated[dict[str, Any], AfterValidator(_some_json)]
"""Up to 1 MB of JSON that `farm.records.values` accepts."""
Name = Annotated[str, AfterValidator(plain)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


HttpUrl = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._:\[\]-]+([/?][^\s\x00-\x1f\x7f]*)?$", max_length=2000)]
"""An address without a user or a password in it."""


class Request(BaseModel):
    """Base settings of all request types: immutable, unknown fields are refused.

    Errors show no values, as one may be a key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_other_type(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes true for 1, JSON does not
        if isinstance(value, _SCALARS_AND_LISTS) and info.field_name is not None:
            annotation: Any = cls.model_fields[info.field_name].annotation
            if isinstance(value, bool | int | float):
                _check_scalar(_scalars_of(annotation), value)
            elif items := _items_of(annotation):
                for each in value.values() if isinstance(value, dict) else value:
                    _check_scalar(items, each)
        return value


_SCALARS_AND_LISTS = (bool, int, float, list, tuple, dict)


def _check_scalar(taken: frozenset[str], value: Any) -> None:
    if isinstance(value, bool):
        if taken == {"number"}:
            raise ValueError("must be a number, not true or false")
    elif isinstance(value, int | float) and taken == {"boolean"}:
        raise ValueError("must be true or false, not a number")


@cache
def _scalars_of(annotation: Any) -> frozenset[str]:
    """Return the scalars among a type's alternatives: `number`, `boolean`, and `other` if neither or both."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        kinds: list[Any] = [type(each) for each in parts]
        return frozenset[str]().union(*map(_scalars_of, kinds))
    if get_origin(annotation) is Annotated:
        return _scalars_of(parts[0])
    if get_origin(annotation) in (Union, UnionType):
        return frozenset[str]().union(*(_scalars_of(each) for each in parts))
    if annotation is bool:
        return frozenset({"boolean"})
    if annotation in (int, float):
        return frozenset({"number"})
    return frozenset() if annotation in (NoneType, str) else frozenset({"other"})


@cache
def _items_of(annotation: Any) -> frozenset[str]:
    """Return the scalars of a list's or a dictionary's values; nothing for other types."""
    if get_origin(annotation) in (Union, UnionType):
        return frozenset[str]().union(*(_items_of(each) for each in get_args(annotation)))
    if get_origin(annotation) not in (list, tuple, dict):
        return frozenset()
    parts = [each for each in get_args(annotation) if each is not Ellipsis]
    scalars = _scalars_of(parts[-1])
    return frozenset() if "other" in scalars else scalars


class Webhook(Request):
    """An address that gets a POST when a batch ends, signed if the farm has a key. `form` is the format of its body, an
    entry point of `farm.webhook_forms`."""

    url: HttpUrl
    form: Annotated[Name, Field(min_length=1, max_length=64)] = "batch_ended"


class SamplingParams(Request):
    """Sampling parameters of the policy. None leaves a value to the engine.

    `seed` makes draws reproducible and independent: each call gets a hash of it with the instance, its index in the
    batch, the sample, the call's number and the tokens before it (`farm.seeds`). Values outside the ranges of all
    engines are refused.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    max_tokens: Count | None = None
    """Of one call; `Limits` has those of a rollout."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Of one call: it may not end by itself before so many tokens."""
    stop: Annotated[tuple[Annotated[Name, Field(min_length=1)], ...], Field(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], Field(max_length=64)] | None = None
    """Tokens that end a call like the end-of-sequence token; the response includes the one that ended it."""
    cache_salt: Annotated[Name, Field(min_length=1, max_length=128)] | None = None
    """Partitions the engine's prefix cache: calls only share entries with the same salt. A trainer that keeps the cache
    across weight updates sends the version of the weights."""
    routed_experts: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    """Record the experts of each token for a trainer that replays the routing. The value is the model's
    `num_experts_per_tok`, its experts per layer and token. Needs engines that were started with
    `--enable-return-routed-experts`; others are refused."""
    seed: Annotated[int, Field(ge=0, lt=2**63 - 1024)] | None = None
