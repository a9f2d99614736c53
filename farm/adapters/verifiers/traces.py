"""Traces of verifiers (`verifiers.v1`): a rollout of the farm as the message graph that its trainers read.

Each training row of the farm is one branch of the graph, from a root to a leaf. A node holds the tokens that it adds:
on the path of a row they give the row's prompt and response, its mask and its log-probabilities. Branches share no
nodes: shared tokens were sampled in the first row and stand in the prompt of the second, as in the farm's rows, so each
token trains once. The tokens between two calls are on the last message between them, as the farm does not record where
each message ends. A row that may not train, and a call without ids, are nodes without tokens. Routed experts of a row
are on its nodes; the last token has those of the token before, as in verifiers.

The types are those of the installed version, 0.4.0 or a60a606, which has no tools of a node and no timeouts of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from verifiers.v1 import errors  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.configs.agent import WireAgentConfig  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.dialects.chat import (  # type: ignore[import-not-found, unused-ignore]
    parse_message,
    parse_tools,
)
from verifiers.v1.graph import MessageNode  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.task import WireTaskData, task_key  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.trace import (  # type: ignore[import-not-found, unused-ignore]
    AgentInfo,
    Timing,
    TraceTask,
    WireTrace,
)
from verifiers.v1.trace import ModelCall as TracedCall
from verifiers.v1.types import SamplingConfig, Usage  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.protocol import TrainerResult, TrainingRow, check_text_only
from farm.records.experts.routed_experts import ExpertIds
from farm.records.rollout import Outcome, Rollout, Stage
from farm.records.rollout import Reward as FarmReward
from farm.records.rollout import Timing as StageTiming
from farm.records.trajectory import Message, ModelCall, Segment, calls_of_segments, segments, tools_by_call

_DETAILS = ("rollout_id", "outcome", "attempt", "version_min", "version_max", "n_invalid_actions", "n_mismatches")
_STOPS = {
    Outcome.MAX_TURNS: "max_turns",
    Outcome.MAX_TOKENS: "max_output_tokens",
    Outcome.CONTEXT_FULL: "max_total_tokens",
}
"""verifiers' stop condition for an outcome caused by the policy; by default `agent_completed`."""
_ERRORS = {
    Outcome.ENGINE_ERROR: errors.ProviderError,
    Outcome.SANDBOX_ERROR: errors.SandboxError,
    Outcome.LOST: errors.SandboxError,
    Outcome.AGENT_ERROR: errors.HarnessError,
    Outcome.HANDLER_ERROR: errors.TaskError,
    Outcome.EVALUATOR_ERROR: errors.TaskError,
}
"""verifiers' type of error for a failure of the farm; by default `EnvError`."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """An ended rollout with everything that a trace shows of it."""

    rollout: Rollout
    calls: Sequence[ModelCall]
    rewards: Sequence[FarmReward]
    timings: Sequence[StageTiming]


def trace_task(task_data: Mapping[str, Any]) -> TraceTask[WireTaskData]:
    """Return the task of a request as traces name it."""
    data = WireTaskData.model_validate(dict(task_data))
    # in the client's form: without defaults of fields that it lacks
    key = task_key(data.model_dump(mode="json", exclude_none=True, exclude_unset=True))
    return TraceTask[WireTaskData](type="FarmTask", data=data, key=key, hash=key)


def trace_of(
    recorded: RecordedRollout, task: TraceTask[WireTaskData], model: str, sampling: SamplingConfig
) -> WireTrace:
    """Return the trace of a rollout. A failed one has its error and no reward: `ok` is False."""
    rollout = recorded.rollout
    agent = AgentInfo[WireAgentConfig](config=WireAgentConfig(model=model, sampling=sampling))
    details = {name: getattr(rollout, name) for name in _DETAILS}
    trace = WireTrace(task=task, agent=agent, info={"farm": details}, timing=_timing(recorded.timings))
    _add_calls(trace, recorded, model)
    if rollout.trainable:
        trace.ok = True
        name = recorded.rewards[-1].evaluator if recorded.rewards else "reward"
        trace.record_reward(name, rollout.reward or 0.0)
        for score in recorded.rewards[-1:]:
            numbers = {key: float(each) for key, each in score.details.items() if isinstance(each, bool | int | float)}
            trace.record_metrics(numbers)
        if rollout.outcome is Outcome.DEADLINE:
            trace.stop("agent_timeout")
            _set(trace, "is_timeout", True)
        else:
            trace.stop(_STOPS.get(rollout.outcome or Outcome.SUBMITTED, "agent_completed"))
    else:
        kind = _ERRORS.get(rollout.outcome or Outcome.CANCELLED, errors.EnvError)
        message = rollout.failure.message if rollout.failure else f"it ended as {rollout.outcome}"
        trace.rewards = {each.evaluator: None for each in recorded.rewards} or {"reward": None}
        trace.record_error(kind(f"rollout {rollout.rollout_id}: {message}"))
        trace.stop_condition = f"{kind.__name__.removesuffix('Error').lower()}_error"
    trace.split_agent_time()
    return trace


def _set(model: Any, name: str, value: Any) -> None:
    """Set a field that not every version has."""
    if name in type(model).model_fields:
        setattr(model, name, value)


def _timing(timings: Sequence[StageTiming]) -> Timing:
    """Return the work times of the last attempt, by verifiers' names of the stages."""
    timing = Timing()
    last = max((each.attempt for each in timings), default=0)
    spans = {Stage.INIT: timing.setup, Stage.RUN: timing.agent, Stage.EVAL: timing.scoring}
    for each in timings:
        if each.attempt == last and each.started_at is not None:
            span = spans[each.stage]
            span.start, span.end = each.started_at, each.finished_at or 0.0
    timing.start = min((each.queued_at for each in timings), default=timing.start)
    return timing


def _add_calls(trace: WireTrace, recorded: RecordedRollout, model: str) -> None:
    """Add the nodes of all calls, row by row, then those of calls without ids; and the calls as they were made."""
    calls = recorded.calls
    graph = _Graph(trace, calls, model)
    for row in recorded.rollout.segments:
        check_text_only(recorded.rollout.rollout_id, row)
    experts = {_ids(row): _experts(row) for row in recorded.rollout.segments}
    for segment, members in zip(segments(calls), calls_of_segments(calls), strict=True):
        graph.add_row(members, with_tokens=segment.trainable, experts=experts.get(_ids(segment)))
    graph.add_row([call for call in calls if not call.token_exact], with_tokens=False)
    trace.calls.sort(key=lambda call: call.time.start)


def _ids(row: Segment) -> bytes:
    return np.concatenate([row.prompt_ids, row.response_ids]).tobytes()


def _experts(row: Segment) -> ExpertIds | None:
    """Return the experts of all tokens of a row; None if any are missing."""
    experts = row.routed_experts
    if experts is None or len(experts) < 2 or experts.first_unknown < len(experts) - 1:
        return None
    return np.concatenate([experts.ids[:-1], experts.ids[-2:-1]])


class _Graph:
    """The message graph of a trace while it is built."""

    def __init__(self, trace: WireTrace, calls: Sequence[ModelCall], model: str) -> None:
        self._trace = trace
        self._model = model
        self._history = _histories(calls)
        self._tools = tools_by_call(calls)

    def add_row(self, calls: Sequence[ModelCall], *, with_tokens: bool, experts: ExpertIds | None = None) -> None:
        """Add a branch: calls that continue each other. `experts` are those of all its tokens."""
        first = len(self._trace.nodes)
        parent: int | None = None
        before: ModelCall | None = None
        for call in calls:
            messages = self._history[call.index] if before is None else [*before.observations, *call.messages]
            put = _put(before, call) if with_tokens else []
            # tokens without a recorded message get an empty one
            unnamed: list[Message] = [{"role": "user", "content": ""}] if put else []
            for number, message in enumerate(messages or unnamed):
                ids = put if number == max(len(messages), 1) - 1 else []
                parent = self._add(parent, message, ids, call.started_at)
            parent = self._add_sampled(parent, call, with_tokens)
            before = call
        if calls:
            self._show(first, calls[0])
        if experts is not None:
            self._route(first, experts)

    def _show(self, root: int, call: ModelCall) -> None:
        tools = parse_tools(self._tools[call.index]) or []
        _set(self._trace.nodes[root], "tools", tools)
        key = ("namespace", "name", "type")
        known = {tuple(getattr(tool, name, None) for name in key): tool for tool in [*self._trace.tools, *tools]}
        self._trace.tools = list(known.values())

    def _route(self, first: int, experts: ExpertIds) -> None:
        """Add the experts of their tokens to the nodes from `first` on."""
        at = 0
        for node in self._trace.nodes[first:]:
            begin, at = at, at + len(node.token_ids)
            if node.token_ids:
                node.routed_experts = experts[begin:at].copy()

    def _add(self, parent: int | None, message: Message, ids: list[int], at: float) -> int:
        node = MessageNode(
            parent=parent, message=parse_message(message), token_ids=ids, mask=[False] * len(ids), timestamp=at
        )
        self._trace.nodes.append(node)
        return len(self._trace.nodes) - 1

    def _add_sampled(self, parent: int | None, call: ModelCall, with_tokens: bool) -> int:
        end = call.started_at + call.latency_s
        node = MessageNode(parent=parent, message=parse_message(call.response), sampled=True, timestamp=end)
        if with_tokens:
            assert call.response_ids is not None
            assert call.response_logprobs is not None
            node.token_ids = call.response_ids.tolist()
            node.mask = [True] * len(node.token_ids)
            node.logprobs = call.response_logprobs.tolist()
        self._trace.nodes.append(node)
        traced = TracedCall(
            node=len(self._trace.nodes) - 1,
            model=self._model,
            sampling=SamplingConfig(**call.sampling),
            finish_reason=_finish_reason(call),
            usage=_usage(call),
        )
        traced.time.start, traced.time.end = call.started_at, end
        self._trace.calls.append(traced)
        return len(self._trace.nodes) - 1


def _histories(calls: Sequence[ModelCall]) -> dict[int, list[Message]]:
    """Return the messages before each call, by index; calls record only those since the call before.

    A call whose messages begin with the very first message started its conversation again.
    """
    histories: dict[int, list[Message]] = {}
    history: list[Message] = []
    first = calls[0].messages[:1] if calls else []
    for call in calls:
        history = [*call.messages] if call.messages[:1] == first else [*history, *call.messages]
        histories[call.index] = history
        history = [*history, call.response, *call.observations]
    return histories


def _put(before: ModelCall | None, call: ModelCall) -> list[int]:
    """Return the unsampled tokens between a call's answer and the next one."""
    assert call.prompt_ids is not None
    if before is None:
        ids: list[int] = call.prompt_ids.tolist()
        return ids
    assert before.prompt_ids is not None
    assert before.response_ids is not None
    rest: list[int] = call.prompt_ids[len(before.prompt_ids) + len(before.response_ids) :].tolist()
    return rest


def _finish_reason(call: ModelCall) -> str | None:
    if call.response.get("tool_calls"):
        return "tool_calls"
    return call.finish_reason if call.finish_reason in ("stop", "length", "tool_calls") else None


def _usage(call: ModelCall) -> Usage:
    cached = call.n_cached_tokens or 0
    return Usage(
        prompt_tokens=call.n_prompt_tokens - cached,
        completion_tokens=call.n_response_tokens,
        cached_input_tokens=call.n_cached_tokens,
    )


class VerifiersResults:
    """A `farm.adapters.protocol.ResultAdapter`: the traces in the env server's replies."""

    def result(self, rollout: Rollout, calls: Sequence[ModelCall], /) -> WireTrace:
        task = trace_task({"data_source": rollout.data_source, "fields": {}})
        return trace_of(RecordedRollout(rollout, calls, [], []), task, "policy", SamplingConfig())

    def read_result(self, result: WireTrace, /) -> TrainerResult:
        rewards = [each.value for each in result.rewards.values() if each is not None]
        info = result.info["farm"]
        return TrainerResult(
            ended=result.ok,
            reward=sum(rewards) if rewards else None,
            stop_reason=result.stop_condition or "",
            error=result.last_error.message if result.has_error else "",
            rows=tuple(_row(branch) for branch in result.branches if branch.token_ids),
            versions=(info["version_min"], info["version_max"]),
            rollout_id=info["rollout_id"],
        )


def _row(branch: Any) -> TrainingRow:
    """Return a branch as a row that does not show where its prompt ends."""
    mask, logprobs = tuple(map(int, branch.sampled_mask)), tuple(branch.logprobs)
    return TrainingRow((), tuple(branch.token_ids), mask, logprobs, None)


results = VerifiersResults()
