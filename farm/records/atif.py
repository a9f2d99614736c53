"""The Agent Trajectory Interchange Format, ATIF 1.8: one document per trajectory, validated like Harbor does.

The models mirror Harbor's `models/trajectories` (0.25, Apache-2.0): the same fields; the same documents are refused.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

ATIF_VERSION = "ATIF-v1.8"
_ONLY_OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def _iso_8601(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    extra: dict[str, Any] | None = None


class AtifMedia(BaseModel):
    """An image or audio in a separate file."""

    model_config = ConfigDict(extra="forbid")

    media_type: str
    path: str
    duration_sec: Annotated[float, Field(ge=0)] | None = None


class AtifContent(BaseModel):
    """A part of a message: text, or a reference to an image or a sound."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: AtifMedia | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> Self:
        if (self.type == "text") is not (self.text is not None and self.source is None):
            raise ValueError("a text part needs `text`, any other part needs `source`, and none may have both")
        if self.source is not None and (self.type == "image") is not (self.source.media_type in _IMAGES):
            raise ValueError(f"{self.source.media_type} is not a media type of {self.type}")
        return self


AtifText = str | list[AtifContent]


class AtifAgent(_Part):
    """The program that ran."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class AtifToolCall(_Part):
    """One call of a tool; `arguments` is an object."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class AtifTrajectoryRef(_Part):
    """A reference to the trajectory of a sub-agent, embedded or in a file."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None

    @model_validator(mode="after")
    def _leads_somewhere(self) -> Self:
        if self.trajectory_id is None and self.trajectory_path is None:
            raise ValueError("a reference needs trajectory_id or trajectory_path")
        return self


class AtifResult(_Part):
    """One result within an observation, of the call that it names, if any."""

    source_call_id: str | None = None
    content: AtifText | None = None
    subagent_trajectory_ref: list[AtifTrajectoryRef] | None = None


class AtifObservation(BaseModel):
    """The results caused by a step."""

    model_config = ConfigDict(extra="forbid")

    results: list[AtifResult]


class AtifMetrics(_Part):
    """Token counts of a model call, and its tokens: ids [n_prompt], ids [n_completion], logprobs [n_completion]."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class AtifStep(_Part):
    """One message of the system, the user or the agent; an agent's has its tool calls and their results."""

    step_id: Annotated[int, Field(ge=1)]
    timestamp: Annotated[str, AfterValidator(_iso_8601)] | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: AtifText
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _of_its_source(self) -> Self:
        if self.source != "agent" and (wrong := [name for name in _ONLY_OF_AGENTS if getattr(self, name) is not None]):
            raise ValueError(f"{', '.join(wrong)} may only be in a step of the agent, not of the {self.source}")
        if self.source == "agent" and self.llm_call_count == 0 and (self.metrics or self.reasoning_content):
            raise ValueError("a step without a model call has no metrics and no reasoning_content")
        return self


class AtifTotals(_Part):
    """Sums over a trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: Annotated[int, Field(ge=0)] | None = None


class AtifTrajectory(_Part):
    """A whole document. Steps are numbered 1, 2, … without gaps; a result names a call of its own step."""

    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.[0-8]$")] = ATIF_VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: Annotated[list[AtifStep], Field(min_length=1)]
    notes: str | None = None
    final_metrics: AtifTotals | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list[AtifTrajectory] | None = None

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        for number, step in enumerate(self.steps, 1):
            if step.step_id != number:
                raise ValueError(f"step {number} has the number {step.step_id}")
            calls = {call.tool_call_id for call in step.tool_calls or ()}
            for result in step.observation.results if step.observation else ():
                if result.source_call_id is not None and result.source_call_id not in calls:
                    raise ValueError(f"step {number} has a result of {result.source_call_id!r}, which it did not call")
        ids = [each.trajectory_id for each in self.subagent_trajectories or ()]
        if None in ids or len(set(ids)) < len(ids):
            raise ValueError("each embedded trajectory needs its own trajectory_id")
        return self

    def to_json(self) -> str:
        """Return the document as JSON without unset fields."""
        return self.model_dump_json(exclude_none=True)
