"""The routes of VeRL-Tool's tool server; its errors are `{"detail": …}`.

Observations are the answers to actions. After any error one is `valid=false` and shows the policy nothing. Actions are
the policy's texts up to a stop token, converted to tool calls of the farm. Texts are searched in one pass: one that
opens ten thousand blocks and closes none costs no more than another.

An action that is repeated after a broken connection is joined, or answered from its sandbox's memory, and executed
once. The same action in a later turn is a new one. So the sandbox is told to forget an action when its client is
connected to receive the answer. A sandbox that ended by its lease or with its node is not replaced: the work of the
trajectory is lost, and an observation of an empty sandbox would be wrong.

Unknown fields of a request are ignored, as its trainer sends some for other servers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator
from starlette.routing import BaseRoute

from farm.api.auth import RouteScopes
from farm.api.endpoints import N_THREADS, Endpoints
from farm.api.protocols import WireProtocol, content_hash, refuse_with_detail
from farm.api.schemas import ApiRequest, RequestRejected
from farm.callers import Scope
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.client.request_checks import checked, invalid
from farm.client.sandboxes.node_line import SentCall
from farm.errors import Conflict, FarmError, InvalidRequest, NotFound, Overloaded, SandboxEnded, ServiceError
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest
from farm.records.lending.sandbox_calls import CALL_S, ForgetCall, SandboxToolCall, ToolResult
from farm.records.request_values import Name, Request
from farm.records.sandbox_spec import SandboxSpec

USAGE = (
    "Available tools:\n"
    "• bash: commands of a persistent shell, between <bash> and </bash> or in a ```bash block.\n"
    "• python: code of a persistent IPython, between <python> and </python> or in a ```python block.\n"
    "• search: a query, between <search> and </search>."
)
TOOLS = ("bash", "python", "search", "finish")
_FENCE = "```"
_FORMS = (
    ("bash", re.compile("<bash>"), "</bash>"),
    ("bash", re.compile(r"```\s*(?:bash|shell|sh|terminal)\b"), _FENCE),
    ("python", re.compile("<python>"), "</python>"),
    ("python", re.compile(r"```\n?(?:python3?|py)\b"), _FENCE),
    ("search", re.compile("<search>"), "</search>"),
    ("answer", re.compile("<answer>"), "</answer>"),
    ("tool_call", re.compile("<tool_call>"), "</tool_call>"),
)
"""Tools by the forms of their actions: the begin and the end of a block."""
_ARGUMENT = {"bash": "command", "python": "code", "search": "query"}
_TAG = {"bash": "o", "python": "output"}

T = TypeVar("T")
log = logging.getLogger(__name__)

_PREFIX = "verl-tool:"
_POLL_S = 2.0
_PAUSE_S = 1.0
SANDBOX_FIELD = "farm_sandbox"
"""The extra field of a trajectory with the spec of its sandbox."""
_MOST = 10_000
_OUTAGES = (ServiceError, SandboxEnded, NotFound, InvalidRequest, Conflict)
"""Errors of a sandbox or its node in place of a result; requests of clients were validated before."""
_SCOPES: RouteScopes = {
    ("POST", "/get_observation"): Scope.SUBMIT,
    ("GET", "/health"): Scope.READ,
    ("GET", "/metrics"): Scope.READ,
}


@dataclass(frozen=True, slots=True)
class ToolAction:
    """A call of a tool; `tool` is `answer` for an action that calls none, and ends its trajectory."""

    tool: str
    arguments: Mapping[str, Any]
    is_fenced: bool = False
    is_json: bool = False


def action_of(text: str) -> ToolAction | None:
    """Return the call of an action: the last block names the tool. None without a complete block."""
    last_end, match = 0, None
    for form in _FORMS:
        blocks = list(_blocks(text, *form[1:]))
        if blocks and blocks[-1][1] > last_end:
            last_end, match = blocks[-1][1], (form, [code.strip() for code, _ in blocks])
    if match is None:
        return None
    (tool, _, closing), codes = match
    if tool == "tool_call":
        return _json_call(codes[-1])
    if tool == "answer":
        return ToolAction(tool, {})
    code = codes[-1] if tool == "search" else "\n".join(codes)
    return ToolAction(tool, {_ARGUMENT[tool]: code}, is_fenced=closing == _FENCE)


def _blocks(text: str, opening: re.Pattern[str], closing: str) -> Iterator[tuple[str, int]]:
    """Yield the content of each complete block, and its end."""
    at = 0
    while (begun := opening.search(text, at)) is not None:
        end = text.find(closing, begun.end())
        if end < 0:
            return
        at = end + len(closing)
        yield text[begun.end() : end], at


def _json_call(text: str) -> ToolAction | None:
    try:
        call = serialization.parsed(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(arguments := call.get("arguments"), dict):
        return None
    tool = call.get("name")
    if not isinstance(tool, str) or tool not in _ARGUMENT or not isinstance(arguments.get(_ARGUMENT[tool]), str):
        return None
    return ToolAction(tool, {_ARGUMENT[tool]: arguments[_ARGUMENT[tool]]}, is_json=True)


def shown(text: str, action: ToolAction, output: str) -> str:
    """Return the output of a tool as the continuation of its action's text: in the block that this opened, if any."""
    if action.tool == "search":
        return f"\n\n<information>{output.strip()}</information>\n\n"
    tag = _TAG[action.tool]
    output = output.strip(" \n")
    if text.endswith(f"{_FENCE}output"):
        return f"\n{output}\n{_FENCE}\n"
    if text.endswith(f"<{tag}>"):
        return f"\n{output}\n</{tag}>\n"
    if action.is_json:
        return f"\n{output}\n"
    if not action.is_fenced:
        return f"\n<{tag}>\n{output}\n</{tag}>\n"
    if text.count(_FENCE) % 2:
        return f"output\n{output}\n{_FENCE}\n"
    return f"\n{_FENCE}output\n{output}\n{_FENCE}\n"


class TrajectorySandboxes:
    """The sandboxes that clients of this protocol have, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._borrower = endpoints.farm.sandboxes

    def check(self, step: TrajectoryStep) -> None:
        """Raise InvalidRequest for an unavailable kind of sandbox."""
        self._borrower.check(self._request(step))

    async def ready(self, step: TrajectoryStep) -> str:
        """Return the id of a trajectory's sandbox once it runs; a new trajectory gets a new one.

        Raises SandboxEnded for one that was lost, Overloaded if there is no capacity for too long, and RequestRejected
        if this API ends.
        """
        wait_s = self._endpoints.config.verl_tool_wait_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            try:
                state = await self._endpoints.run(self._found_or_begun, step)
                break
            except Overloaded:
                self._check_open()
                if clock() > deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
        if state.pending:
            state = await self._endpoints.await_sandbox(state, deadline - clock(), _POLL_S)
        if state.ended:
            raise state.ended_error()
        if state.pending:
            self._check_open()
            raise Overloaded(f"sandbox {state.sandbox_id} is still {state.state} after {wait_s:g} s")
        return state.sandbox_id

    def _found_or_begun(self, step: TrajectoryStep) -> BorrowedSandbox:
        newest = self._borrower.newest_named(_name(step))
        if newest is None or (newest.ended and newest.finished):
            return self._borrower.begin(self._request(step))
        return newest

    def _check_open(self) -> None:
        if self._endpoints.is_closed:
            ends = "this API ends: send the same request again"
            raise RequestRejected(ProblemDetails(503, "ServiceError", ends))

    async def finish(self, step: TrajectoryStep) -> None:
        """End the sandbox of a trajectory, if it has one; then its id may begin another."""
        await self._endpoints.run(self._borrower.finish_named, _name(step))

    def _request(self, step: TrajectoryStep) -> BorrowRequest:
        return BorrowRequest(spec=step.spec, lease_s=self._endpoints.config.verl_tool_lease_s, name=_name(step))

    def counts(self) -> dict[str, int]:
        """Return the number of waiting, starting and running sandboxes."""
        return {state.value: n for state, n in self._borrower.counts(_PREFIX).items()}


def _name(step: TrajectoryStep) -> str:
    return f"{_PREFIX}{step.trajectory_id}"


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
            values = getattr(self, name)
            if values is not None and len(values) != len(self.trajectory_ids):
                raise ValueError(f"Length of {name} must match trajectory_ids")
        return self

    def steps(self) -> list[TrajectoryStep]:
        """Return the actions one by one. Raises InvalidRequest naming the extra field that is wrong."""
        seen: Counter[tuple[str, str]] = Counter()
        steps: list[TrajectoryStep] = []
        for index, (trajectory_id, action) in enumerate(zip(self.trajectory_ids, self.actions, strict=True)):
            extra = self.extra_fields[index] if self.extra_fields else {}
            call_id = content_hash([action, seen[trajectory_id, action]])
            seen[trajectory_id, action] += 1
            finishes, is_last = (self._flag(name, index, extra) for name in ("finish", "is_last_step"))
            steps.append(TrajectoryStep(trajectory_id, action, call_id, finishes, is_last, _spec(extra, index)))
        return steps

    def _flag(self, name: str, index: int, extra: dict[str, Any]) -> bool:
        if name in extra:
            return bool(extra[name])
        values = getattr(self, name)
        return bool(values is not None and values[index])


def _spec(extra: dict[str, Any], index: int) -> SandboxSpec:
    if extra.get(SANDBOX_FIELD) is None:
        return SandboxSpec()
    try:
        return SandboxSpec.model_validate(extra[SANDBOX_FIELD])
    except ValidationError as error:
        path = f"extra_fields[{index}].{SANDBOX_FIELD}"
        raise invalid(error).renamed(lambda field: f"{path}.{field}".rstrip(".")) from None


@dataclass(slots=True)
class ActionObservation:
    """The answer to one action, with the sandbox that was called for it, if any."""

    shown: str | dict[str, Any]
    done: bool
    valid: bool
    sandbox_id: str = ""
    queued_s: float = 0.0


_Answered: TypeAlias = list[tuple[TrajectoryStep, ActionObservation]]
"""The steps of one trajectory in a request, with their observations."""


class Observations:
    """Answers requests for observations, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._sandboxes = TrajectorySandboxes(endpoints)
        self.n_active = 0

    async def answer(self, request: ApiRequest) -> dict[str, Any]:
        """Return the observations of a request. If a part of it is refused, nothing is executed."""
        steps = request.parse_body(ObservationRequest).steps()
        for step in steps:
            self._sandboxes.check(step)
        clock = asyncio.get_running_loop().time
        began = clock()
        self.n_active += 1
        try:
            by_trajectory = await self._of_all(steps)
            if not await request.is_disconnected():
                await _all([self._settle(answered) for answered in by_trajectory])
        finally:
            self.n_active -= 1
        answers = {id(step): observation for answered in by_trajectory for step, observation in answered}
        observations = [answers[id(step)] for step in steps]
        queued_s = max(each.queued_s for each in observations)
        return {
            "observations": [each.shown for each in observations],
            "dones": [each.done for each in observations],
            "valids": [each.valid for each in observations],
            "processing_time_ms": 1000 * max(0.0, clock() - began - queued_s),
            "queue_time_ms": 1000 * queued_s,
        }

    async def _of_all(self, steps: Sequence[TrajectoryStep]) -> list[_Answered]:
        """Return the observations of each trajectory, made one after the other; trajectories run concurrently."""
        by_trajectory: defaultdict[str, list[TrajectoryStep]] = defaultdict(list)
        for step in steps:
            by_trajectory[step.trajectory_id].append(step)

        async def of_one(trajectory: Sequence[TrajectoryStep]) -> _Answered:
            return [(step, await self._of(step)) for step in trajectory]

        return await _all([of_one(trajectory) for trajectory in by_trajectory.values()])

    async def _of(self, step: TrajectoryStep) -> ActionObservation:
        action = None if step.finishes else action_of(step.action)
        try:
            if step.finishes:
                await self._sandboxes.finish(step)
                return ActionObservation("", done=True, valid=True)
            if action is None:
                reason = "No valid tool found for action"
                return ActionObservation({"obs": "", "invalid_reason": reason, "available_tools": USAGE}, False, False)
            if action.tool == "answer":
                return ActionObservation("", done=True, valid=False)
            return await self._acted(step, action)
        except _OUTAGES as error:
            return _outage(step, error)

    async def _acted(self, step: TrajectoryStep, action: ToolAction) -> ActionObservation:
        limit_s = self._endpoints.config.verl_tool_action_s
        try:
            values = {"name": action.tool, "arguments": dict(action.arguments), "timeout_s": limit_s}
            call = checked(SandboxToolCall, values)
        except InvalidRequest as error:
            # caused by the policy: too long, or not text
            return ActionObservation({"obs": "", "invalid_reason": str(error)}, done=False, valid=False)
        clock = asyncio.get_running_loop().time
        began = clock()
        sandbox_id = await self._sandboxes.ready(step)
        queued_s = clock() - began
        sent = SentCall("tool", serialization.written(call), limit_s, step.call_id, needs_state=True)
        result = serialization.read(ToolResult, await self._endpoints.nodes.call(sandbox_id, sent))
        text = shown(step.action, action, result.text)
        return ActionObservation(text, result.done, not result.refused, sandbox_id, queued_s)

    async def _settle(self, answered: _Answered) -> None:
        """Forget the answered actions of a trajectory, or end its sandbox after its last step."""
        began = max((index + 1 for index, (step, _) in enumerate(answered) if step.finishes), default=0)
        in_sandbox = [each for each in answered[began:] if each[1].sandbox_id]
        try:
            if any(step.is_last for step, _ in answered[began:]):
                await self._sandboxes.finish(answered[0][0])
            elif in_sandbox:
                forget = ForgetCall(call_ids=[step.call_id for step, _ in in_sandbox])
                sent = SentCall("forget", serialization.written(forget), CALL_S)
                await self._endpoints.nodes.call(in_sandbox[-1][1].sandbox_id, sent)
        except _OUTAGES as error:
            # the next repeat would be answered by the result of this one
            for step, observation in in_sandbox:
                lost = _outage(step, error)
                observation.shown, observation.done, observation.valid = lost.shown, lost.done, lost.valid


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of these to their end. Raises the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _outage(step: TrajectoryStep, error: FarmError) -> ActionObservation:
    message = f"trajectory {step.trajectory_id}: {error}"
    log.warning("No observation: %s", message)
    return ActionObservation({"obs": "", "error": message}, done=True, valid=False)


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._observations = Observations(endpoints)
        self._sandboxes = TrajectorySandboxes(endpoints)
        self._began = time.monotonic()

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.route("POST", "/get_observation", self._observations.answer),
            endpoints.health("/health", self._health),
            endpoints.get("/metrics", lambda request: self._metrics()),
        ]

    def _health(self) -> dict[str, Any]:
        return {
            "status": "healthy",
            "concurrent_requests": self._observations.n_active,
            "thread_pool_size": N_THREADS,
            "active_tasks": self._observations.n_active,
            "max_concurrent": self._endpoints.config.max_sandboxes,
            "tools": list(TOOLS),
            "uptime_seconds": time.monotonic() - self._began,
        }

    def _metrics(self) -> dict[str, Any]:
        config = self._endpoints.config
        limits = {"max_concurrent": config.max_sandboxes, "timeout": config.verl_tool_action_s}
        return {
            "active_requests": self._observations.n_active,
            "cached_responses": 0,
            "tools_initialized": len(TOOLS),
            "uptime_seconds": time.monotonic() - self._began,
            "config": {**limits, "hashing_enabled": True},
            "sandboxes": self._sandboxes.counts(),
        }


PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
