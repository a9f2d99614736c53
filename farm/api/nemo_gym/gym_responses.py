"""The answer of `/run`: the row, with a response of the Responses API and a reward, or with the class of a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.api.nemo_gym.gym_rows import KEY_COLUMN, RowNames
from farm.api.protocol_parts.message_texts import reasoning_and_text
from farm.api.protocol_parts.task_rows import columns_without
from farm.records.rollout import Outcome, Rollout
from farm.records.trajectory import Message, ModelCall, ToolSchema, calls_of_segments, tools_by_call

Item = dict[str, Any]
_KINDS = {
    Outcome.SANDBOX_ERROR: "provider_unavailable",
    Outcome.ENGINE_ERROR: "transport_unreachable",
    Outcome.EVALUATOR_ERROR: "verifier_error",
    Outcome.LOST: "session_lost",
    Outcome.CANCELLED: "cancelled",
    Outcome.STALE: "cancelled",
}
"""Kinds of failure of unscored rollouts, in NeMo Gym's terms; all others are `agent_run_error`."""
_CUT = (Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL)


def run_result(row: Mapping[str, Any], names: RowNames, rollout: Rollout, calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the answer of `/run` for an ended rollout.

    One that the farm broke, or that was cancelled, has neither reward nor response: it is a failure, which collection
    keeps apart from results and retries, and not a zero. `mask_sample` is true for it, and for one whose engine saw
    other tokens than it was sent.
    """
    result = {**columns_without(row, (KEY_COLUMN,)), "rollout_id": rollout.rollout_id}
    if not rollout.trainable:
        kind = _KINDS.get(rollout.outcome or Outcome.LOST, "agent_run_error")
        message = f": {rollout.failure.message}" if rollout.failure is not None else ""
        reason = f"rollout {rollout.rollout_id} ended as {rollout.outcome}{message}"
        failure = {"mask_sample": True, "failure_kind": kind, "failure_reason": reason}
        return result | failure | {"_ng_failure_class": kind, "_ng_failure_message": reason}
    row_calls = longest_row(calls)
    differs = any(call.mismatch is not None for call in row_calls)
    result |= {"mask_sample": differs, "failure_kind": None, "failure_reason": None}
    if differs:
        reason = "the engine saw other tokens than it was sent"
        result |= {"failure_kind": "farm:token_mismatch", "failure_reason": reason}
    elif rollout.outcome is Outcome.DEADLINE:
        result |= {"failure_kind": "agent_timeout", "failure_reason": "the time limit of the run was reached"}
    tools = tools_by_call(calls)[row_calls[0].index] if row_calls else []
    return result | {"reward": rollout.reward, "response": _response(names, rollout, row_calls, tools)}


def longest_row(calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Return the calls of the training row with the most sampled tokens; all calls where ids are unknown.

    A client joins the tokens of an answer to one row, so each call must begin with those before it.
    """
    rows = calls_of_segments(calls)
    return max(rows, key=lambda row: sum(call.n_response_tokens for call in row)) if rows else calls


def output_items(calls: Sequence[ModelCall]) -> list[Item]:
    """Return the items that a model and its tools added to the input; the last of a call has its tokens."""
    output: list[Item] = []
    for number, call in enumerate(calls):
        if number:
            output += [_input_item(message) for message in call.messages]
        items = _sampled_items(call)
        if call.token_exact:
            items[-1] |= _tokens(call)
        output += items
        output += [_input_item(message) for message in call.observations]
    return output


def _tokens(call: ModelCall) -> Item:
    assert call.prompt_ids is not None
    assert call.response_ids is not None
    assert call.response_logprobs is not None
    return {
        "prompt_token_ids": call.prompt_ids.tolist(),
        "generation_token_ids": call.response_ids.tolist(),
        "generation_log_probs": call.response_logprobs.tolist(),
    }


def _sampled_items(call: ModelCall) -> list[Item]:
    reasoning, text = reasoning_and_text(call.response)
    tool_calls = call.response.get("tool_calls") or []
    items: list[Item] = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{call.index}", "summary": summary})
    if text or not (reasoning or tool_calls):
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": f"msg_{call.index}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": content})
    for each in tool_calls:
        function = each.get("function") or {}
        name = {"name": str(function.get("name", "")), "arguments": str(function.get("arguments", ""))}
        items.append({"type": "function_call", "call_id": str(each.get("id", "")), "status": "completed", **name})
    return items


def _input_item(message: Message) -> Item:
    _, text = reasoning_and_text(message)
    if message.get("role") == "tool":
        return {"type": "function_call_output", "call_id": str(message.get("tool_call_id", "")), "output": text}
    return {"type": "message", "role": str(message.get("role", "user")), "content": text}


def _function(tool: ToolSchema) -> Item:
    """Return a tool in the form of the Responses API."""
    function = tool.get("function") or {}
    return {
        "type": "function",
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def _response(
    names: RowNames, rollout: Rollout, calls: Sequence[ModelCall], tools: Sequence[ToolSchema]
) -> dict[str, Any]:
    cut = rollout.outcome in _CUT
    sampled = sum(call.n_response_tokens for call in calls)
    prompted = sum(call.n_prompt_tokens for call in calls)
    cached = sum(call.n_cached_tokens or 0 for call in calls)
    params = names.responses_create_params
    return {
        "id": f"resp_{rollout.rollout_id}",
        "object": "response",
        "created_at": rollout.submitted_at,
        "model": params.model or names.policy_model_name,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(calls),
        "parallel_tool_calls": params.parallel_tool_calls,
        "tool_choice": "auto",
        "tools": [_function(tool) for tool in tools],
        "usage": {
            "input_tokens": prompted,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompted + sampled,
        },
    }
