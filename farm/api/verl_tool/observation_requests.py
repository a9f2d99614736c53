"""The body of `/get_observation`: an action for each of some trajectories.

Unknown fields are ignored, as its trainer sends some for other servers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from farm.api.protocol_parts.content_hash import content_hash
from farm.client.request_checks import invalid
from farm.errors import InvalidRequest
from farm.records.request_values import Name, Request
from farm.records.sandbox_spec import SandboxSpec

SANDBOX_FIELD = "farm_sandbox"
"""The extra field of a trajectory with the spec of its sandbox."""
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class TrajectoryStep:
    """One action of one trajectory. Repeats have the same `call_id`."""

    trajectory_id: str
    action: str
    call_id: str
    finishes: bool
    is_last: bool
    spec: SandboxSpec


class ObservationRequest(Request):
    """Lists of one length. `finish` and `is_last_step` may also be extra fields, which have priority."""

    model_config = ConfigDict(extra="ignore")

    trajectory_ids: Annotated[
        list[Annotated[Name, Field(min_length=1, max_length=180)]], Field(min_length=1, max_length=_MOST)
    ]
    actions: list[str]
    extra_fields: list[dict[str, Any]] | None = None
    finish: list[bool] | None = None
    is_last_step: list[bool] | None = None

    @model_validator(mode="after")
    def _have_one_length(self) -> Self:
        for name in ("actions", "extra_fields", "finish", "is_last_step"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.trajectory_ids):
                raise ValueError(f"Length of {name} must match trajectory_ids")
        return self

    def steps(self) -> list[TrajectoryStep]:
        """Return the actions one by one. Raises InvalidRequest naming the extra field that is wrong."""
        seen: Counter[tuple[str, str]] = Counter()
        result: list[TrajectoryStep] = []
        for index, (trajectory_id, action) in enumerate(zip(self.trajectory_ids, self.actions, strict=True)):
            extra = self.extra_fields[index] if self.extra_fields else {}
            call_id = content_hash([action, seen[trajectory_id, action]])
            seen[trajectory_id, action] += 1
            finishes, is_last = (self._flag(name, index, extra) for name in ("finish", "is_last_step"))
            result.append(TrajectoryStep(trajectory_id, action, call_id, finishes, is_last, _spec(extra, index)))
        return result

    def _flag(self, name: str, index: int, extra: dict[str, Any]) -> bool:
        if name in extra:
            return bool(extra[name])
        given = getattr(self, name)
        return bool(given is not None and given[index])


def _spec(extra: dict[str, Any], index: int) -> SandboxSpec:
    if extra.get(SANDBOX_FIELD) is None:
        return SandboxSpec()
    try:
        return SandboxSpec.model_validate(extra[SANDBOX_FIELD])
    except ValidationError as error:
        place = f"extra_fields[{index}].{SANDBOX_FIELD}"
        named = [(f"{place}.{field}".rstrip("."), text) for field, text in invalid(error).complaints]
        raise InvalidRequest.of(named) from None
