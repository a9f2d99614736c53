"""The result object of `/process`, from the stored rollout, with its messages and their token ids.

The ids of all messages, concatenated, are the ids that the policy saw and sampled. Ids between two answers are all at
the first message between them, as the chat template is not run again to attribute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.api.prorl.job_requests import SamplingMix
from farm.api.protocols import exact_tokens, longest_row, reasoning_and_text
from farm.records.rollout import Outcome, Rollout, Stage, State, Timing
from farm.records.trajectory import Message, ModelCall, ToolSchema, tools_by_call

_RESOLVED = 0.99
_FINISHED = (Outcome.SUBMITTED, Outcome.ANSWERED)
_ERRORS = {
    Outcome.MAX_TURNS: "agent reached the maximum iteration",
    Outcome.MAX_TOKENS: "length: the limit of sampled tokens was reached",
    Outcome.CONTEXT_FULL: "length: the context window is full",
    Outcome.INVALID_ACTION: "tool_call: the policy's calls could not be read",
    Outcome.REPEATING: "AgentStuckInLoopError: Agent got stuck in a loop",
    Outcome.DEADLINE: "timeout: the time limit of the run was reached",
    Outcome.STALE: "its weights were too old",
    Outcome.CANCELLED: "cancelled",
}

WireMessage = dict[str, Any]


def result_of(
    ids: dict[str, Any],
    sampling: SamplingMix,
    rollout: Rollout,
    calls: Sequence[ModelCall],
    timings: Sequence[Timing],
    submission: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the result of an ended rollout; `ids` are those of its instance.

    One that the farm broke, or that was cancelled, has no messages, so its clients know that there is nothing to train
    on.
    """
    whole = rollout.state is State.COMPLETED
    with_tokens = sampling.token_level_generation is not False
    transcript = conversation(calls if whole else (), with_tokens, sampling.ensure_thinking_end_properly)
    error = _error(rollout)
    critical = _critical(rollout)
    times = _times(rollout, timings)
    result = {
        "instance_id": ids.get("instance_id", rollout.instance_id),
        "trajectory_id": ids.get("trajectory_id"),
        "resolved": rollout.reward is not None and rollout.reward > _RESOLVED,
        "reward": rollout.reward,
        "critical_error": critical,
        "success": error is None,
        "error": error,
        "finish": rollout.outcome in _FINISHED,
        "git_patch": (submission or {}).get("files", {}).get("model.patch"),
        "messages": transcript.messages,
        "tools": transcript.tools,
        "end_properly": transcript.ends_properly and rollout.outcome is not Outcome.INVALID_ACTION,
        "filter": _filter(rollout, critical, error),
        "timing": times | {"timeout_triggered": rollout.outcome is Outcome.DEADLINE},
        "rollout_id": rollout.rollout_id,
    }
    if rollout.reward is not None:
        # one of its clients reads this, and takes a missing value as 0.0
        result["score"] = rollout.reward
    return result | ({"traceback": error} if rollout.state is State.FAILED else {})


def _error(rollout: Rollout) -> str | None:
    if rollout.failure is not None:
        return f"{rollout.failure.kind}: {rollout.failure.message}"
    if rollout.outcome in _FINISHED:
        return None
    return "it has not ended" if rollout.outcome is None else _ERRORS.get(rollout.outcome, rollout.outcome.value)


def _critical(rollout: Rollout) -> str | None:
    """Return the stage in which it broke; `timeout` if the run exceeded its time limit."""
    if rollout.state is not State.COMPLETED:
        return rollout.stage.value
    return "timeout" if rollout.outcome is Outcome.DEADLINE else None


def _filter(rollout: Rollout, critical: str | None, error: str | None) -> bool:
    """Return whether it should not train; a malformed call does train, as the mistake that it is."""
    if critical is not None:
        return True
    return error is not None and rollout.outcome is not Outcome.INVALID_ACTION


def _times(rollout: Rollout, timings: Sequence[Timing]) -> dict[str, float]:
    """Return the seconds of the last attempt's stages, and all other time since the submit."""
    last = max((timing.attempt for timing in timings), default=0)
    spent = {
        stage: sum(timing.work_s or 0.0 for timing in timings if timing.stage is stage and timing.attempt == last)
        for stage in Stage
    }
    counted = sum(spent.values())
    ended_at = rollout.finished_at or rollout.submitted_at
    return {
        "init_time": spent[Stage.INIT],
        "run_time": spent[Stage.RUN],
        "eval_time": spent[Stage.EVAL],
        "others_time": max(0.0, ended_at - rollout.submitted_at - counted),
        "counted_elapsed": counted,
    }


@dataclass(frozen=True, slots=True)
class Conversation:
    """`tools` are those of the first prompt, in the form of the chat API.

    `ends_properly` is false if the conversation was ended at an answer with unclosed reasoning.
    """

    messages: list[WireMessage]
    tools: list[ToolSchema]
    ends_properly: bool


def conversation(calls: Sequence[ModelCall], with_tokens: bool, end_thinking: bool) -> Conversation:
    """Return the conversation up to the policy's last answer; of several rows the one with the most sampled tokens.

    With `end_thinking`, an answer that begins to reason and does not stop is closed, with its calls as text, and is the
    last one.
    """
    chosen = longest_row(calls)
    tools = tools_by_call(calls)[chosen[0].index] if chosen else []
    messages: list[WireMessage] = []
    n_seen = 0
    between: list[Message] = []
    for call in chosen:
        between += call.messages
        messages += _put(between, call, n_seen, with_tokens)
        answer = _answer(call, with_tokens)
        messages.append(answer)
        if end_thinking and "<think>" in answer["content"] and "</think>" not in answer["content"]:
            _close(answer)
            return Conversation(messages, tools, False)
        n_seen = call.n_prompt_tokens + call.n_response_tokens if call.token_exact else 0
        between = list(call.observations)
    return Conversation(messages, tools, True)


def _put(between: Sequence[Message], call: ModelCall, n_seen: int, with_tokens: bool) -> list[WireMessage]:
    """Return the messages between two answers; the first of them has the ids of them all."""
    messages = [_plain(message) for message in between]
    if with_tokens and call.token_exact:
        assert call.prompt_ids is not None
        ids = call.prompt_ids[n_seen:].tolist()
        for index, message in enumerate(messages):
            message |= {"token_ids": [] if index else ids, "input_ids": None, "output_ids": None, "logprobs": None}
    return messages


def _answer(call: ModelCall, with_tokens: bool) -> WireMessage:
    message = _plain(call.response)
    message["role"] = "assistant"
    if with_tokens and call.token_exact:
        prompt, ids, logprobs = exact_tokens(call)
        message |= {"token_ids": ids, "input_ids": prompt, "output_ids": ids, "logprobs": logprobs}
    return message


def _plain(message: Mapping[str, Any]) -> WireMessage:
    """Return a message in the form for its trainers' templates: its text, and only the function of a call."""
    reasoning, text = reasoning_and_text(message)
    plain: WireMessage = {"role": str(message.get("role", "user"))}
    plain["content"] = f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [call.get("function", {}) for call in calls]
    return plain


def _close(answer: WireMessage) -> None:
    """Close the reasoning of an answer, with its calls in the text."""
    calls = [
        f'\n<tool_call>\n{{"name": "{call.get("name")}", "arguments": {call.get("arguments")}}}\n</tool_call>'
        for call in answer.pop("tool_calls", ())
    ]
    answer["content"] = f"{answer['content']}\n{''.join(calls)}</think>"
