"""Events of a rollout: a model request for each of its calls, its reward, and events that clients posted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from farm.api.agent_lightning.lightning_requests import ATTEMPT, EventsQuery, NewEvent
from farm.api.agent_lightning.lightning_rollouts import LightningRollouts, key_of
from farm.api.protocol_parts.kept_state import KeptState
from farm.client.local import LocalFarm
from farm.errors import InvalidRequest, NotFound
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Message, ModelCall, version_number
from farm.records.values import size_of

Event = dict[str, Any]
_MAX_BYTES = 4_000_000
"""The size limit for the events that clients post for one rollout."""


class LightningEvents:
    """The events of all rollouts."""

    def __init__(self, farm: LocalFarm, rollouts: LightningRollouts) -> None:
        self._farm = farm
        self._rollouts = rollouts

    def post(self, name: str, attempt: str, event: NewEvent) -> Event:
        """Store an event of a client. Raises NotFound, and InvalidRequest beyond the size limit."""
        self._rollouts.stored(name)
        if attempt != ATTEMPT:
            raise NotFound(f"Rollout {name} has no attempt {attempt!r}: its only attempt is {ATTEMPT!r}")
        posted = _event(name, event.event_type, time.time(), event.data)

        def add(state: Mapping[str, Any]) -> Mapping[str, Any]:
            events = [*state.get("events", []), posted]
            try:
                size_of(events, _MAX_BYTES)
            except ValueError as error:
                raise InvalidRequest(f"together with the stored events: {error}", field="data") from None
            return {"events": events}

        self._posted(name).change(add)
        return posted

    def of_rollout(self, name: str, query: EventsQuery) -> list[Event]:
        """Return the events of a rollout, on request as triplets. Raises NotFound.

        A rollout that broke has no model requests, so that nothing is trained on, whatever reward its client fills in.
        """
        _, rollout = self._rollouts.stored(name)
        is_triplet = query.format == "triplet"
        events: list[Event] = []
        if rollout.trainable:
            calls = self._farm.calls(rollout.rollout_id)
            calls = _last_of_each_prompt(calls) if is_triplet else calls
            written = _triplet if is_triplet else _request
            events += [_event(name, "model_request", call.started_at + call.latency_s, written(call)) for call in calls]
            events.append(_event(name, "reward", rollout.finished_at or 0.0, _reward(rollout, is_triplet)))
        events += self._posted(name).read().get("events", [])
        return [event for event in events if query.event_type in (None, event["event_type"])]

    def _posted(self, name: str) -> KeptState:
        return KeptState(self._farm.runs, key_of(name))


def _event(name: str, kind: str, timestamp: float, data: dict[str, Any]) -> Event:
    return {"event_type": kind, "rollout_id": name, "attempt_id": ATTEMPT, "timestamp": timestamp, "data": data}


def _last_of_each_prompt(calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Return the calls, but of calls with the same prompt only the last."""
    last = {_prompt(call): call.index for call in calls}
    return [call for call in calls if not call.token_exact or last[_prompt(call)] == call.index]


def _prompt(call: ModelCall) -> bytes:
    return b"" if call.prompt_ids is None else call.prompt_ids.tobytes()


def _tokens(call: ModelCall) -> tuple[list[int], list[int], list[float] | None]:
    """Return the ids of prompt and answer, and the log-probabilities: all, or none."""
    if not call.token_exact:
        return [], [], None
    assert call.prompt_ids is not None
    assert call.response_ids is not None
    assert call.response_logprobs is not None
    return call.prompt_ids.tolist(), call.response_ids.tolist(), call.response_logprobs.tolist()


def _server(call: ModelCall) -> dict[str, Any]:
    version = version_number(call.policy_version)
    return {"model": call.sampling.get("model"), "version": None if version == NO_VERSION else version}


def _state(call: ModelCall) -> dict[str, Any]:
    """Return whether it may train: not if an engine saw other tokens than it was sent."""
    return {"http_status": 200, "status": "ok" if call.mismatch is None else "error"}


def _triplet(call: ModelCall) -> dict[str, Any]:
    prompt, response, logprobs = _tokens(call)
    tokens = {"prompt_token_ids": prompt, "response_token_ids": response, "response_log_probs": logprobs}
    return {**tokens, "server": _server(call), **_state(call)}


def _request(call: ModelCall) -> dict[str, Any]:
    """Return a call as a chat completion, with the messages since the call that it continues."""
    prompt, response, logprobs = _tokens(call)
    messages: list[Message] = call.messages
    choice = {"index": 0, "message": call.response, "finish_reason": call.finish_reason, "token_ids": response}
    choice["logprobs"] = None if logprobs is None else {"content": [{"logprob": each} for each in logprobs]}
    usage = {"prompt_tokens": call.n_prompt_tokens, "completion_tokens": call.n_response_tokens}
    server = _server(call)
    return {
        "model": server["model"],
        "model_version": server["version"],
        "request": {"messages": messages, **call.sampling},
        "response": {"choices": [choice], "prompt_token_ids": prompt, "usage": usage},
        "server": {**server, "endpoint": call.engine},
        "latency_ms": call.latency_s * 1000,
        "retry_count": 0,
        "usage": usage,
        "finish_reason": call.finish_reason,
        **_state(call),
    }


def _reward(rollout: Rollout, is_triplet: bool) -> dict[str, Any]:
    reason = str(rollout.outcome)
    values = {"value": rollout.reward, "source": "agent", "reason": reason}
    return values if is_triplet else {**values, "message": None}
