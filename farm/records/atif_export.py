"""A rollout as an ATIF document without loss: text with token ids, log-probabilities and weight versions.

Model calls are the steps of the agent, in order; each has its prompt's ids, so that rows can be rebuilt from it.
`extra` holds values without an ATIF field: weight versions, engine, sampling, the reason for a new training row.

The models mirror Harbor's `models/trajectories` (ATIF 1.8; 0.25, Apache-2.0): the same fields; the same documents are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from farm.records.rollout import Reward, Rollout
from farm.records.trajectory import Message, ModelCall, all_tools

ATIF_VERSION = "ATIF-v1.8"
_ONLY_OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")

_DISTRIBUTION = "rollout-farm"
_IMAGE = "image/png"


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


def atif_trajectory(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward] = (), agent: str = ""
) -> AtifTrajectory:
    """Return the document of a rollout. Raises ValueError without model calls: ATIF has no empty trajectories."""
    if not calls:
        raise ValueError(f"{rollout.rollout_id} has no model calls, and an ATIF document needs a step")
    steps: list[AtifStep] = []
    for call in calls:
        for message in call.messages:
            _add(steps, message)
        steps.append(_agent_step(len(steps) + 1, call))
        for message in call.observations:
            _observe(steps, message)
    return AtifTrajectory(
        session_id=rollout.rollout_id,
        trajectory_id=rollout.rollout_id,
        agent=AtifAgent(
            name=agent or _DISTRIBUTION, version=version(_DISTRIBUTION), tool_definitions=all_tools(calls) or None
        ),
        steps=steps,
        final_metrics=_totals(calls, len(steps)),
        extra=_of_rollout(rollout, rewards),
    )


def _of_rollout(rollout: Rollout, rewards: Sequence[Reward]) -> dict[str, Any]:
    last = rewards[-1] if rewards else None
    return {
        "data_source": rollout.data_source,
        "instance_id": rollout.instance_id,
        "group_id": rollout.group_id,
        "attempt": rollout.attempt,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "trainable": rollout.trainable,
        "evaluator": None if last is None else last.evaluator,
        "reward_details": None if last is None else last.details,
        "versions": [rollout.version_min, rollout.version_max],
    }


def _totals(calls: Sequence[ModelCall], n_steps: int) -> AtifTotals:
    cached = [call.n_cached_tokens for call in calls if call.n_cached_tokens is not None]
    return AtifTotals(
        total_prompt_tokens=sum(call.n_prompt_tokens for call in calls),
        total_completion_tokens=sum(call.n_response_tokens for call in calls),
        total_cached_tokens=sum(cached) if cached else None,
        total_steps=n_steps,
    )


def _agent_step(number: int, call: ModelCall) -> AtifStep:
    response = call.response
    return AtifStep(
        step_id=number,
        timestamp=datetime.fromtimestamp(call.started_at, UTC).isoformat(),
        source="agent",
        message=_text(response.get("content")),
        reasoning_content=response.get("reasoning_content") or response.get("reasoning") or None,
        tool_calls=[_tool_call(each) for each in response.get("tool_calls") or ()] or None,
        metrics=_metrics(call),
        llm_call_count=1,
        extra={
            "index": call.index,
            "engine": call.engine,
            "latency_s": call.latency_s,
            "finish_reason": call.finish_reason,
            "policy_version": call.policy_version,
            "versions": [{"version": span.version, "start": span.start, "end": span.end} for span in call.versions],
            "sampling": call.sampling,
            "begins_row": call.begins,
            "n_invalid_calls": call.n_invalid,
            "mismatch": call.mismatch,
        },
    )


def _metrics(call: ModelCall) -> AtifMetrics:
    logprobs = call.response_logprobs
    sound = logprobs is not None and not np.isnan(logprobs).any()
    return AtifMetrics(
        prompt_tokens=call.n_prompt_tokens,
        completion_tokens=call.n_response_tokens,
        cached_tokens=call.n_cached_tokens,
        prompt_token_ids=None if call.prompt_ids is None else call.prompt_ids.tolist(),
        completion_token_ids=None if call.response_ids is None else call.response_ids.tolist(),
        # JSON has no infinity: the lowest float32 stands for a probability of 0
        logprobs=np.nan_to_num(logprobs).tolist() if logprobs is not None and sound else None,
        extra=None if sound or logprobs is None else {"logprobs": "left out: some are not numbers"},
    )


def _tool_call(call: Mapping[str, Any]) -> AtifToolCall:
    function = call.get("function") or {}
    text = function.get("arguments") or ""
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        arguments = None
    sound = isinstance(arguments, dict)
    return AtifToolCall(
        tool_call_id=str(call.get("id") or ""),
        function_name=str(function.get("name") or ""),
        arguments=arguments if sound else {},
        extra=None if sound else {"text": text},
    )


def _add(steps: list[AtifStep], message: Message) -> None:
    role = message.get("role")
    if role == "tool":
        _observe(steps, message)
        return
    number, text = len(steps) + 1, _text(message.get("content"))
    if role == "assistant":
        # an earlier answer, rewritten by the agent
        calls = [_tool_call(each) for each in message.get("tool_calls") or ()] or None
        steps.append(
            AtifStep(
                step_id=number,
                source="agent",
                message=text,
                tool_calls=calls,
                is_copied_context=True,
                llm_call_count=0,
            )
        )
    else:
        source, extra = ("system", None) if role == "system" else ("user", None if role == "user" else {"role": role})
        steps.append(AtifStep(step_id=number, source=source, message=text, extra=extra))  # type: ignore[arg-type]


def _observe(steps: list[AtifStep], message: Message) -> None:
    """Add a tool's result to the newest step that called it, else to the last step, without a call."""
    call_id, text = message.get("tool_call_id"), _text(message.get("content"))
    if message.get("role") != "tool":
        _add(steps, message)
        return
    for step in reversed(steps):
        if any(call.tool_call_id == call_id for call in step.tool_calls or ()):
            _put(step, AtifResult(source_call_id=call_id, content=text))
            return
    if not steps:
        steps.append(AtifStep(step_id=1, source="user", message=text, extra={"role": "tool", "tool_call_id": call_id}))
        return
    _put(steps[-1], AtifResult(content=text, extra={"tool_call_id": call_id}))


def _put(step: AtifStep, result: AtifResult) -> None:
    if step.observation is None:
        step.observation = AtifObservation(results=[])
    step.observation.results.append(result)


def _text(content: Any) -> AtifText:
    if content is None:
        return ""
    return [_part(part) for part in content] if isinstance(content, list) else str(content)


def _part(part: Any) -> AtifContent:
    if isinstance(part, Mapping) and part.get("type") == "image_url":
        url = str((part.get("image_url") or {}).get("url") or "")
        kind = url[5:].partition(";")[0] if url.startswith("data:") else _IMAGE
        return AtifContent(type="image", source=AtifMedia(media_type=kind, path=url))
    if isinstance(part, Mapping) and part.get("type") == "image" and part.get("sha256"):
        # an artefact of the rollout: its turn precedes this name
        kind = str(part.get("media_type") or _IMAGE)
        path = f"{part['sha256']}.{kind.partition('/')[2]}"
        return AtifContent(type="image", source=AtifMedia(media_type=kind, path=path))
    text = part.get("text") if isinstance(part, Mapping) else None
    return AtifContent(type="text", text=text if isinstance(text, str) else json.dumps(part))
