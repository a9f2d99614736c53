"""A rollout as an ATIF document without loss: text with token ids, log-probabilities and weight versions.

Model calls are the steps of the agent, in order; each has its prompt's ids, so that rows can be rebuilt from it.
`extra` holds values without an ATIF field: weight versions, engine, sampling, the reason for a new training row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from farm.records.atif import (
    AtifAgent,
    AtifContent,
    AtifMedia,
    AtifMetrics,
    AtifObservation,
    AtifResult,
    AtifStep,
    AtifText,
    AtifToolCall,
    AtifTotals,
    AtifTrajectory,
)
from farm.records.rollout import Reward, Rollout
from farm.records.trajectory import Message, ModelCall, all_tools

_DISTRIBUTION = "rollout-farm"
_IMAGE = "image/png"


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
    """Add a message of the prompt."""
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
