"""Makes a trace of branching model calls, and reads its branches by verifiers' own types, also from its record."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
from verifiers.v1.graph import _attribute_routed_experts  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.trace import WireTrace  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.verifiers.traces import RecordedRollout, trace_of, trace_task
from farm.records.experts.expert_stretches import assembled, stretches_of
from farm.records.experts.routed_experts import CallExperts
from farm.records.rollout import Outcome, Reward, Rollout, Stage, State
from farm.records.trajectory import Message, ModelCall, segments, token_ids

USER: Message = {"role": "user", "content": "Look around."}
LOOK: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
}
SEEN: Message = {"role": "tool", "tool_call_id": "c1", "content": "a b"}


def message_of(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(index: int, prompt: list[int], response: list[int] | None, message: Message, **more: Any) -> ModelCall:
    logprobs = None if response is None else np.linspace(-1, -0.1, len(response), dtype=np.float32)
    values: dict[str, Any] = {"messages": [], "finish_reason": "stop"} | more
    return ModelCall(
        index=index,
        response=message,
        engine="http://e/v1",
        started_at=100.0 + index,
        latency_s=0.5,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response or ()),
        prompt_ids=None if response is None else token_ids(prompt),
        response_ids=None if response is None else token_ids(response),
        response_logprobs=logprobs,
        sampling={"temperature": 1.0},
        **values,
    )


BASH, SUBMIT = (
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("bash", "submit")
)
ALL_DIGITS = {"float_decimals": None}
CALLS = [
    call(0, [1, 2], [3, 4], LOOK, messages=[USER], observations=[SEEN], tools=[BASH]),
    # continues the previous call, after the tool's result
    call(1, [1, 2, 3, 4, 5, 6], [7], message_of("One thing.")),
    # the history was rewritten: another row
    call(
        2,
        [1, 2, 9],
        [8, 8],
        message_of("Or two."),
        messages=[{"role": "user", "content": "Sure?"}],
        tools=[BASH, SUBMIT],
    ),
    # an engine saw another prompt than it was sent: this row may not train
    call(3, [4, 4], [4], message_of("Three."), messages=[USER], mismatch=1),
    # a call without ids, of a conversation that started again
    call(4, [0] * 6, None, message_of("Four."), messages=[USER], finish_reason="length"),
]


def rollout(reward: float | None) -> Rollout:
    return Rollout(
        rollout_id="b.0.0",
        batch_id="b",
        group_index=0,
        sample_index=0,
        data_source="chat",
        instance_id="",
        stage=Stage.EVAL,
        state=State.FAILED if reward is None else State.COMPLETED,
        attempt=1,
        node="n",
        outcome=Outcome.LOST if reward is None else Outcome.MAX_TURNS,
        reward=reward,
        failure=None,
        n_turns=len(CALLS),
        n_response_tokens=5,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=1,
    )


def routed() -> dict[str, Any]:
    """Give the calls of the first row experts, each only those of its new tokens, and compare its branch with
    verifiers' own attribution of the same answers to the same nodes.
    """
    truth = np.random.default_rng(0).integers(0, 500, (7, 2, 3)).astype(np.uint16)
    starts, ends = (0, 3), (3, 6)
    calls = [
        replace(each, routed_experts=CallExperts.of(start, truth[start:end]))
        for each, start, end in zip(CALLS[:2], starts, ends, strict=True)
    ]
    [row] = segments(calls)
    of_calls = {each.index: truth[start:end] for each, start, end in zip(calls, starts, ends, strict=True)}
    experts = assembled(7, stretches_of(row, calls), of_calls)
    with_experts = replace(rollout(0.25), segments=(replace(row, routed_experts=experts),))
    task = trace_task({"data_source": "chat", "fields": {}})
    trace = trace_of(RecordedRollout(with_experts, calls, [], []), task, "policy", SamplingConfig())
    ours = [None if node.routed_experts is None else node.routed_experts.tolist() for node in trace.nodes]
    for node in trace.nodes:
        node.routed_experts = None
    path_len, taken = 0, 0
    for n_nodes, start, end in zip((2, 2), starts, ends, strict=True):
        rows = truth[start:end]
        payload = {
            "data": base64.b64encode(rows.tobytes()).decode(),
            "shape": list(rows.shape),
            "start": start,
            "dtype": "uint16",
        }
        new = list(range(taken, taken + n_nodes))
        # 0.4.0 has the earlier nodes, too, whose last token a turn corrects
        before = (list(range(taken)),) if len(signature(_attribute_routed_experts).parameters) == 5 else ()
        _attribute_routed_experts(trace, *before, new, path_len, payload)
        taken, path_len = taken + n_nodes, path_len + sum(len(trace.nodes[number].token_ids) for number in new)
    theirs = [None if node.routed_experts is None else node.routed_experts.tolist() for node in trace.nodes]
    (branch,) = trace.branches
    return {"ours": ours, "theirs": theirs, "n_tokens": len(branch.token_ids), "n_rows": len(branch.routed_experts)}


def made(reward: float | None) -> WireTrace:
    rewards = [] if reward is None else [Reward(reward, {"passed": True, "note": "fine", "n": 3}, "grader", 1.0)]
    task = trace_task({"data_source": "chat", "fields": {}})
    trace = trace_of(
        RecordedRollout(rollout(reward), CALLS, rewards, []), task, "policy", SamplingConfig(temperature=1)
    )
    return WireTrace.model_validate(json.loads(json.dumps(trace.model_dump(mode="json", context=ALL_DIGITS))))


if __name__ == "__main__":
    scored, lost = made(0.25), made(None)
    rows = [
        {
            "token_ids": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
            "mask": [False] * len(row.prompt_ids) + row.response_mask.astype(bool).tolist(),
            "logprobs": [0.0] * len(row.prompt_ids) + row.response_logprobs.tolist(),
        }
        for row in segments(CALLS)
        if row.trainable
    ]
    branches = [
        {
            "token_ids": branch.token_ids,
            "mask": branch.sampled_mask,
            "logprobs": branch.logprobs,
            "messages": [[message.role, message.content] for message in branch.messages],
            "calls": [call.finish_reason for call in branch.calls],
            "tools": [tool.model_dump(exclude_none=True) for tool in getattr(branch, "tools", ())],
        }
        for branch in scored.branches
    ]
    result = {
        "rows": rows,
        "branches": branches,
        "tools": [tool.name for tool in scored.tools],
        "rewards": {name: each.value for name, each in scored.rewards.items()},
        "metrics": scored.metrics,
        "stop": [scored.ok, scored.stop_condition, scored.is_truncated],
        "routed": routed(),
        "order": [call.time.start for call in scored.calls],
        "lost": [lost.ok, lost.has_error, lost.stop_condition, lost.last_error.type, lost.rewards],
    }
    print(json.dumps(result))
