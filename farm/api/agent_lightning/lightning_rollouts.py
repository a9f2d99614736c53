"""Rollouts by their client's ids: each is a batch of one, found by its idempotency key.

Its events are a model request for each of its calls, its reward, and those that clients posted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from farm.api.agent_lightning.lightning_models import (
    ATTEMPT,
    EventsQuery,
    LightningState,
    NewEvent,
    NewRollout,
    RunnerConfig,
    TerminalQuery,
)
from farm.api.protocols import ROW_READERS, KeptState, columns_without, content_hash, exact_tokens, known_handler
from farm.client.local import LocalFarm
from farm.client.request_checks import check_instances, checked
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.ids import rollout_id as farm_rollout_id
from farm.records.request import BatchRequest
from farm.records.rollout import Rollout, Stage, State
from farm.records.training_run import KeyedBatch
from farm.records.trajectory import NO_VERSION, Message, ModelCall, version_number
from farm.records.values import size_of
from farm.store.reports import keyed_rollouts

_PREFIX = "agent-lightning:"
_DELETED = "agent-lightning"
"""The consumer that marks a rollout as deleted by its client."""
_KEYS = 1000
_WIRE = ("data_source", "data_id", "instance_id")
_VAL_TEMPERATURE = 0.7
"""The temperature of rollouts that do not train, as in the gateway's configuration."""
_VERSIONS = {LightningState.QUEUING: 1, LightningState.RUNNING: 2}

Event = dict[str, Any]
_MAX_BYTES = 4_000_000
"""The size limit for the events that clients post for one rollout."""


class LightningRollouts:
    """The rollouts that clients of this protocol submitted."""

    def __init__(self, farm: LocalFarm) -> None:
        self._farm = farm

    def create(self, wanted: Sequence[NewRollout], model: str) -> list[dict[str, Any]]:
        """Submit rollouts, all or none, and return them; one whose id is known is returned without a new submit.

        Raises InvalidRequest, UnknownHandler, and Conflict for an id that belongs to another rollout.
        """
        named = [
            each if each.rollout_id else each.model_copy(update={"rollout_id": uuid.uuid4().hex}) for each in wanted
        ]
        keys = [key_of(each.rollout_id or "") for each in named]
        known = self._known(keys)
        requests: dict[str, BatchRequest] = {}
        for index, (each, key) in enumerate(zip(named, keys, strict=True)):
            content = each.model_dump(mode="json")
            earlier = known.get(key) or requests.get(key)
            first = earlier.metadata["rollout"] if earlier is not None else None
            if first is None:
                requests[key] = self._checked(each, content, key, model, f"rollouts[{index}]")
            elif first != content:
                raise Conflict(f"Rollout {each.rollout_id}: the id belongs to another rollout: use another rollout_id")
            elif key in known and self._farm.acknowledged(known[key].batch_id, _DELETED):
                raise Conflict(f"Rollout {each.rollout_id}: the rollout was deleted: use another rollout_id")
        for request in requests.values():
            self._farm.submit(request)
        return [self.rollout(each.rollout_id or "") for each in named]

    def rollout(self, name: str) -> dict[str, Any]:
        """Return a rollout in the protocol's form. Raises NotFound."""
        content, rollout = self.stored(name)
        return self._as_sent(content, rollout)

    def stored(self, name: str) -> tuple[Mapping[str, Any], Rollout]:
        """Return a rollout's request and its present state. Raises NotFound, for a deleted one, too."""
        for batch in self._farm.runs.keyed_batches([key_of(name)]):
            if not self._farm.acknowledged(batch.batch_id, _DELETED):
                return batch.metadata["rollout"], self._farm.rollout(farm_rollout_id(batch.batch_id, 0, 0))
        raise NotFound(f"Rollout not found: {name}")

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel an open rollout. Raises NotFound, and Conflict if it has ended."""
        _, rollout = self.stored(name)
        if not self._farm.cancel(rollout.batch_id):
            raise Conflict(f"Rollout {name}: cannot transition {state_of(rollout).value} -> failed")
        return self.rollout(name)

    def delete(self, name: str) -> None:
        """Cancel a rollout, and hide it. An unknown id is ignored."""
        try:
            _, rollout = self.stored(name)
        except NotFound:
            return
        self._farm.cancel(rollout.batch_id)
        ended = self._farm.rollout(rollout.rollout_id)
        self._farm.acknowledge_up_to(rollout.batch_id, ended.cursor, _DELETED)

    def listing(self, states: Sequence[LightningState], limit: int) -> list[dict[str, Any]]:
        """Return the oldest rollouts in these states."""
        rows = self._farm.store.read(partial(keyed_rollouts.shown, prefix=_PREFIX, consumer=_DELETED))
        rollouts: list[dict[str, Any]] = []
        for metadata, rollout in rows:
            if len(rollouts) >= limit:
                break
            if state_of(rollout) in states:
                rollouts.append(self._as_sent(metadata["rollout"], rollout))
        return rollouts

    def terminal(self, query: TerminalQuery) -> dict[str, Any]:
        """Return a page of ended rollouts, in the order of their ends; deleted ones are only counted."""
        after, limit = max(0, query.after), min(max(1, query.limit), 10_000)
        store = self._farm.store
        if store.read(partial(keyed_rollouts.any_without_position, prefix=_PREFIX)):
            with suppress(IntegrityError):
                store.write(partial(keyed_rollouts.assign_positions, prefix=_PREFIX))
        page = partial(keyed_rollouts.ended, prefix=_PREFIX, consumer=_DELETED, after=after, limit=limit)
        rows, last, total = store.read(page)
        items = [
            {
                "rollout_id": metadata["rollout"]["rollout_id"],
                "state": state_of(rollout).value,
                "data_id": _data_id(metadata["rollout"]["input"]),
                "is_train": metadata["rollout"]["is_train"],
            }
            for metadata, rollout, is_deleted in rows
            if not is_deleted
        ]
        return {"items": items, "next_after": last, "total_terminal": total}

    def _known(self, keys: Sequence[str]) -> dict[str, KeyedBatch]:
        chunks = [keys[start : start + _KEYS] for start in range(0, len(keys), _KEYS)]
        return {batch.key: batch for chunk in chunks for batch in self._farm.runs.keyed_batches(chunk)}

    def _checked(self, wanted: NewRollout, content: dict[str, Any], key: str, model: str, path: str) -> BatchRequest:
        try:
            request = _batch_request(wanted, content, key, model)
            check_instances(
                request,
                lambda: {name for node in self._farm.nodes() for name in node.handlers},
                lambda: [state.engine for state in self._farm.engines()],
            )
        except InvalidRequest as error:
            raise error.renamed(lambda field: _sent_name(path, field)) from None
        return request

    def _as_sent(self, content: Mapping[str, Any], rollout: Rollout) -> dict[str, Any]:
        state = state_of(rollout)
        failure = f"{rollout.failure.kind}: {rollout.failure.message}" if rollout.failure is not None else None
        status = {
            "state": state.value,
            "k8s_job_name": None,
            "last_attempt_id": None if state is LightningState.QUEUING else ATTEMPT,
            "error_message": (failure or str(rollout.outcome)) if state is LightningState.FAILED else None,
            "version": _VERSIONS.get(state, 3),
            "created_at": rollout.submitted_at,
            "updated_at": rollout.finished_at or self._began(rollout, state),
        }
        config = content["config"] or RunnerConfig().model_dump(mode="json")
        metadata = {"batch_idx": None, "sample_idx_in_batch": None} | (content["metadata"] or {})
        sent = {name: content[name] for name in ("rollout_id", "input", "is_train")}
        return {**sent, "config": config, "metadata": metadata, "status": status}

    def _began(self, rollout: Rollout, state: LightningState) -> float:
        if state is LightningState.QUEUING:
            return rollout.submitted_at
        started = [each.started_at for each in self._farm.timings(rollout.rollout_id) if each.started_at is not None]
        return min(started, default=rollout.submitted_at)


def key_of(name: str) -> str:
    """Return the idempotency key of a rollout from its client's id."""
    return f"{_PREFIX}{content_hash(name)}"


def state_of(rollout: Rollout) -> LightningState:
    """Return the state of a rollout: every scored one has succeeded, whatever its score."""
    if rollout.finished_at is not None:
        return LightningState.SUCCEEDED if rollout.trainable else LightningState.FAILED
    waits = rollout.stage is Stage.INIT and rollout.state is State.QUEUED
    return LightningState.QUEUING if waits else LightningState.RUNNING


def _batch_request(wanted: NewRollout, content: dict[str, Any], key: str, model: str) -> BatchRequest:
    row = wanted.input
    name = row.get("data_source")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("is missing: set it to the name of a handler", field="input.data_source")
    handler = known_handler(name)
    config = wanted.config or RunnerConfig()
    fields = row.get("fields")
    if not isinstance(fields, dict):
        fields = dict(row) if handler in ROW_READERS else columns_without(row, _WIRE)
    values: dict[str, Any] = {
        "instances": [{"data_source": handler, "fields": fields, "instance_id": str(row.get("instance_id") or "")}],
        "limits": {"run_s": config.timeout_seconds},
        "sampling": {} if wanted.is_train else {"temperature": _VAL_TEMPERATURE},
        "agent": (config.local.agent_class if config.local is not None else None) or "",
        "model": model,
        "idempotency_key": key,
        "metadata": {"rollout": content},
    }
    return checked(BatchRequest, values)


def _sent_name(path: str, field: str) -> str:
    """Return the request's name of a field of the batch."""
    inner = field.removeprefix("instances[0].")
    names = {"agent": "config.local.agent_class", "limits.run_s": "config.timeout_seconds", "metadata": "input"}
    if inner != field and not inner.startswith("fields"):
        inner = f"input.{inner}"
    elif inner.startswith("fields"):
        inner = f"input{inner.removeprefix('fields')}"
    return f"{path}.{names.get(inner, inner)}"


def _data_id(row: Mapping[str, Any]) -> str:
    return str(row.get("data_id") or row.get("instance_id") or "")


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
    return exact_tokens(call) if call.token_exact else ([], [], None)


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
