"""The base of all request types, and the values that they have in common."""

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
    """Return a text if it is at most 1 MB of what may be stored. Raises ValueError."""
    size_of(text, _MAX_EXTRA_BYTES)
    return text


Json = Annotated[dict[str, Any], AfterValidator(_some_json)]
"""Up to 1 MB of what `farm.records.values` lets pass."""
Name = Annotated[str, AfterValidator(plain)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


HttpUrl = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._:\[\]-]+([/?][^\s\x00-\x1f\x7f]*)?$", max_length=2000)]
"""An address without a user or a password in it."""


class Request(BaseModel):
    """Common settings of all request types: unknown fields are refused, values do not change.

    Errors show no values, as one may be a key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_other_type(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes true for 1, and JSON does not
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
    """Return which of `number` and `boolean` a type has among its forms, and `other` for what has neither or both."""
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
    """Return the scalars of a list's or a dictionary's values; nothing where they are of other types."""
    if get_origin(annotation) in (Union, UnionType):
        return frozenset[str]().union(*(_items_of(each) for each in get_args(annotation)))
    if get_origin(annotation) not in (list, tuple, dict):
        return frozenset()
    parts = [each for each in get_args(annotation) if each is not Ellipsis]
    scalars = _scalars_of(parts[-1])
    return frozenset() if "other" in scalars else scalars


class Webhook(Request):
    """The address that is told of a batch's end, by a POST, signed if the farm has a key for it. `form` makes its body,
    for systems with one of their own: an entry point of `farm.webhook_forms`."""

    url: HttpUrl
    form: Annotated[Name, Field(min_length=1, max_length=64)] = "batch_ended"


class SamplingParams(Request):
    """Sampling parameters of the policy. None leaves a value to the engine.

    `seed` makes draws reproducible and independent: each call is sent a hash of it with the instance, its place in the
    batch, the sample, the number of the call and the tokens before it (`farm.seeds`). Values that no engine takes are
    refused.
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
    """Of one call: the tokens before which it may not end by itself."""
    stop: Annotated[tuple[Annotated[Name, Field(min_length=1)], ...], Field(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], Field(max_length=64)] | None = None
    """Tokens that end a call as the end-of-sequence token does; a call holds the one that ended it."""
    cache_salt: Annotated[Name, Field(min_length=1, max_length=128)] | None = None
    """Divides the engine's prefix cache: a call finds what calls of the same salt left there. A trainer that keeps the
    cache across updates of weights sends the weights' name."""
    routed_experts: Annotated[int, Field(strict=True, ge=1, le=256)] | None = None
    """Record the experts that each token was routed to, for a trainer that replays them: the number is how many of them
    a layer of the model uses for a token, its `num_experts_per_tok`. Only of engines that were started with
    `--enable-return-routed-experts`; others are refused."""
    seed: Annotated[int, Field(ge=0, lt=2**63 - 1024)] | None = None
