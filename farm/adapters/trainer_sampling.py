"""Sampling parameters and lengths of trainers: each is mapped to the farm's, known to have no effect, or refused.

All values are sent explicitly, even those without an effect: servers take missing ones from the model's own
`generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from farm.client.request_checks import invalid
from farm.errors import InvalidRequest
from farm.records.request import Limits, SamplingParams

_FORM = frozenset(
    {
        *("logprobs", "top_logprobs", "prompt_logprobs", "flat_logprobs", "return_token_ids", "return_logprob"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "no_stop_trim"),
        *("detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "skip_reading_prefix_cache"),
    }
)
"""Parameters of the response format, which the farm sets itself: no token depends on them."""
_NEUTRAL: Mapping[str, object] = {"n": 1, "ignore_eos": False, "best_of": 1, "length_penalty": 1.0, "num_beams": 1}
"""Values of parameters that the farm lacks which have no effect."""
_ALIASES = {
    "max_new_tokens": "max_tokens",
    "max_generate_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_ALL_TOKENS = (0, -1)
"""The values of `top_k` without an effect in vLLM and SGLang."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class TrainerSampling:
    """The sampling parameters of one trainer: `where` is the source of its values, for errors.

    `ignored` are names of parameters to leave out, `remedy` is the advice in the error for an unknown one.
    """

    where: str
    ignored: Collection[str] = ()
    remedy: str = "leave it out"

    def fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values as fields of SamplingParams; None means not set.

        Raises InvalidRequest naming a parameter that the farm lacks.
        """
        fields: dict[str, Any] = {}
        for name, value in values.items():
            known = _ALIASES.get(name, name)
            if value is None or name in self.ignored or name in _FORM:
                continue
            if known in SamplingParams.model_fields:
                fields[known] = _ours(known, value)
            elif value not in (_NEUTRAL.get(name, _ABSENT), [], {}):
                raise InvalidRequest(
                    f"the farm has no such parameter (it is {value!r}): {self.remedy}", field=f"{self.where}.{name}"
                )
        return fields

    def params(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return the values as SamplingParams. Raises InvalidRequest for invalid values and unknown parameters."""
        try:
            return SamplingParams(**self.fields(values))
        except ValidationError as error:
            raise invalid(error, self.where) from None


def _ours(name: str, value: Any) -> Any:
    if name == "top_k" and value in _ALL_TOKENS:
        return -1
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "stop_token_ids":
        return tuple(value)
    return value


def option(config: Any, path: str) -> Any:
    """Return an option of a trainer's configuration by its path with dots; None if it is missing."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def limits_of(settings: Mapping[str, Any], **of_trainer: int | None) -> Limits:
    """Return the limits of a trainer's rollouts: the user's settings override the trainer's configuration.

    None is a limit that the trainer does not set. Raises InvalidRequest.
    """
    limits = settings.get("limits") or {}
    own = limits.model_dump(exclude_unset=True) if isinstance(limits, Limits) else dict(limits)
    try:
        return Limits(**{name: value for name, value in of_trainer.items() if value is not None} | own)
    except ValidationError as error:
        raise invalid(error, "limits") from None


def refuse_options(options: Mapping[str, Any], unchanged: Mapping[str, object], reasons: Mapping[str, str]) -> None:
    """Raise InvalidRequest for an option of a trainer that differs from the only supported value."""
    for name, reason in reasons.items():
        value = options.get(name)
        if value is not None and value != unchanged.get(name):
            raise InvalidRequest(f"{reason} (it is {value!r})", field=name)
