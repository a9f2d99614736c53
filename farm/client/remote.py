"""A farm through its API: the verbs as HTTP requests, with the same types and errors."""

from __future__ import annotations

import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from farm.callers import ApiKey, LoggedOrder
from farm.client.consumer_stream import CONSUMER, BatchWatch, Page, check_consumer
from farm.client.farm import Farm
from farm.client.http_connection import ApiConnection
from farm.client.request_checks import checked, checked_request, with_findings
from farm.client.sandboxes.borrower import Borrower
from farm.client.verb_groups import AccessControl, AnnotationLog, ArchiveState, NewKey, Runs
from farm.client.weight_update import WeightUpdateOrders
from farm.home import WAIT_TIMEOUT_S
from farm.ids import RolloutRef
from farm.records.engine_state import EngineState, Paused, StoredEngine
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest
from farm.records.lending.sandbox_calls import CALLS, VERBS
from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
from farm.records.request_values import Request
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Conservation,
    KeptArtefact,
    Reward,
    Rollout,
    StageTimes,
    Timing,
    Violation,
)
from farm.records.scoring.annotation import Annotation, NewAnnotation, NewAnnotations
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate
from farm.records.trajectory import ModelCall
from farm.settings import settings

T = TypeVar("T")
_LISTED, _CALLS = 1000, 256
"""Page sizes: items of a list, and model calls."""
_ROLLOUTS, _GROUPS = 64, 8
"""Page sizes: rollouts, and groups, which may be large."""

_PATH = "/v1/sandboxes"


@dataclass(frozen=True, slots=True)
class Submitted:
    """The response to a submit."""

    batch_id: str


class RemoteFarm(Farm):
    """The verbs as requests to the API at an address.

    While the API is unavailable, methods wait like a store waits for its database; then they raise FarmUnreachable.
    """

    def __init__(self, url: str, key: str = "", patience_s: float = WAIT_TIMEOUT_S) -> None:
        own = settings()
        self._home = own.home.absolute()
        self._api = ApiConnection(url, key.strip(), patience_s, own.api_ca)
        self.orders = RemoteOrders(self._api)
        self.runs = RemoteRuns(self._api)
        self.sandboxes = RemoteBorrower(self._api)
        self.access = RemoteAccess(self._api)
        self.annotations = RemoteAnnotations(self._api)

    @classmethod
    def opened(cls, url: str, key: str, first_s: float) -> RemoteFarm:
        """Connect to an API that answers within `first_s`; see `farm.connect`."""
        farm = cls(url, key)
        try:
            farm.check(first_s)
        except BaseException:
            farm.close()
            raise
        return farm

    def check(self, patience_s: float | None = None) -> None:
        """Raise FarmUnreachable, StoreUnavailable, or NotAllowed for a wrong key; `patience_s` overrides its own."""
        self._api.get(list[BatchSummary], "/v1/batches", patience_s=patience_s, limit=1)

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        # the key makes a resent request the same batch, even if the API stopped before it answered
        batch_request = with_findings(checked_request(request), self._home)
        if batch_request.idempotency_key is None:
            # a request that may be resent needs a key
            batch_request = batch_request.model_copy(update={"idempotency_key": f"submit-{secrets.token_hex(16)}"})
        body = batch_request.model_dump(mode="json", exclude_defaults=True)
        return self._api.post(Submitted, "/v1/batches", body).batch_id

    def archive_state(self, digest: str) -> ArchiveState:
        return self._api.get(ArchiveState, f"/v1/archives/{digest}")

    def put_archive_part(self, digest: str, number: int, data: bytes) -> None:
        body = {"number": number, "data": b64encode(data).decode()}
        self._api.post(ArchiveState, f"/v1/archives/{digest}/parts", body)

    def complete_archive(self, digest: str, n_parts: int) -> None:
        self._api.post(ArchiveState, f"/v1/archives/{digest}", {"n_parts": n_parts})

    def batches(self, limit: int = 20, before: str | None = None) -> list[BatchSummary]:
        summaries: list[BatchSummary] = []
        while len(summaries) < limit:
            n = min(_LISTED, limit - len(summaries))
            page = self._api.get(list[BatchSummary], "/v1/batches", limit=n, **_given(before=before))
            summaries += page
            if len(page) < n:
                break
            before = page[-1].batch_id
        return summaries

    def recent(self, limit: int = 20) -> list[str]:
        return [batch.batch_id for batch in self.batches(limit)]

    def status(self, batch_id: str) -> BatchStatus:
        return self._api.get(BatchStatus, _of_batch(batch_id))

    def rollouts(self, batch_id: str) -> list[Rollout]:
        return self._api.pages(Rollout, _of_batch(batch_id, "/rollouts"), lambda rollout: rollout.rollout_id)

    def conservation(self, batch_id: str) -> Conservation:
        return self._api.get(Conservation, _of_batch(batch_id, "/conservation"))

    def violations(self, batch_id: str) -> Sequence[Violation]:
        return self._api.get(list[Violation], _of_batch(batch_id, "/violations"))

    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        check_consumer(consumer)
        return self._api.get(int, _of_batch(batch_id, "/acknowledged"), consumer=consumer)

    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        check_consumer(consumer)
        return self._api.post(int, _of_batch(batch_id, "/acknowledged"), {"cursor": cursor, "consumer": consumer})

    @contextmanager
    def _watch(self, batch_id: str) -> Iterator[BatchWatch]:
        yield _RemoteWatch(self._api, batch_id)

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        self.wait(batch_id, timeout_s)
        watch, rollouts, cursor = _RemoteWatch(self._api, batch_id), dict[str, Rollout](), 0
        while page := watch.page(cursor, False, 0.0).rollouts:
            # a rollout that is rescored meanwhile comes again
            rollouts.update((rollout.rollout_id, rollout) for rollout in page)
            cursor = page[-1].cursor
        return sorted(rollouts.values(), key=lambda rollout: (rollout.group_index, rollout.sample_index))

    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        # not repeatable: after a lost answer the ids cancelled so far would be missing
        return self._api.post(list[str], "/v1/cancel", _of_any(id, rollout_ids))

    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        # not repeatable: after a lost answer the ids that were started are unknown
        return self._api.post(list[str], "/v1/rescore", _of_any(id, rollout_ids), repeatable=False)

    def rollout(self, rollout_id: str) -> Rollout:
        return self._api.get(Rollout, _of_rollout(rollout_id))

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        return self._api.pages(ModelCall, _of_rollout(rollout_id, "/calls"), lambda call: call.index, _CALLS)

    def timings(self, rollout_id: str) -> Sequence[Timing]:
        return self._api.get(list[Timing], _of_rollout(rollout_id, "/timings"))

    def stage_times(self, batch_id: str) -> Sequence[StageTimes]:
        return self._api.get(list[StageTimes], _of_batch(batch_id, "/stage_times"))

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        return self._api.get(list[Reward], _of_rollout(rollout_id, "/rewards"))

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        return self._api.get(list[KeptArtefact], _of_rollout(rollout_id, "/artefacts"))

    def artefact(self, rollout_id: str, name: str) -> bytes:
        return self._api.data(_of_rollout(rollout_id, "/artefact"), name=name)

    def nodes(self) -> Sequence[Node]:
        return self._api.pages(Node, "/v1/nodes", lambda node: node.node)

    def drain_node(self, node: str) -> None:
        # not repeatable: it could drain a node that was started since
        self._api.post(dict, "/v1/nodes/drain", {"node": node}, repeatable=False)

    def add_engine(
        self, url: str, model: str = "", key: str = "none", tokenizer: str = "", tool_format: str = ""
    ) -> None:
        body = {"url": url, "model": model, "key": key, "tokenizer": tokenizer, "tool_format": tool_format}
        self._api.post(dict, "/v1/engines", body)

    def drain_engine(self, url: str) -> None:
        self._api.post(dict, "/v1/engines/drain", {"url": url})

    def remove_engine(self, url: str) -> None:
        # not repeatable: it could remove an engine that was added since
        self._api.post(dict, "/v1/engines/remove", {"url": url}, repeatable=False)

    def clear_engines(self, forget_weights: bool = False) -> int:
        return self._api.post(int, "/v1/engines/clear", {"forget_weights": forget_weights}, repeatable=False)

    def engines(self) -> Sequence[EngineState]:
        return self._api.pages(EngineState, "/v1/engines", lambda state: state.engine.url)

    def close(self) -> None:
        self._api.close()


class _RemoteWatch:
    """Long polls: the API answers when there are results, or after the time limit."""

    def __init__(self, api: ApiConnection, batch_id: str) -> None:
        self._api = api
        self._batch_id = batch_id

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        limit = _GROUPS if whole_groups else _ROLLOUTS
        path = _of_batch(self._batch_id, "/ended")
        return self._api.get(Page, path, cursor=cursor, groups=whole_groups, limit=limit, wait_s=wait_s)

    def has_open(self, wait_s: float) -> bool:
        return self._api.get(bool, _of_batch(self._batch_id, "/open"), wait_s=wait_s)


class RemoteOrders(WeightUpdateOrders):
    """Orders through the API. This client waits for them to be followed."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    @contextmanager
    def _acknowledgements(self) -> Iterator[Callable[[float], object]]:
        yield time.sleep

    def chosen(self, urls: Collection[str] | None = None) -> list[StoredEngine]:
        return self._api.post(list[StoredEngine], "/v1/engines/chosen", {"urls": _listed(urls)})

    def newest_version(self) -> str:
        return self._api.get(str, "/v1/engines/version")

    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None, held: bool = False) -> dict[str, int]:
        order = {"mode": paused, "by": by, "urls": _listed(urls), "held": held}
        return self._api.post(dict[str, int], "/v1/engines/pause", order)

    def order_version(self, version: str, urls: Collection[str] | None, path: str = "") -> dict[str, int]:
        body = {"version": version, "urls": _listed(urls), "path": path}
        return self._api.post(dict[str, int], "/v1/engines/version", body)

    def hold(self, by: str, urls: Collection[str] | None) -> None:
        self._api.post(dict, "/v1/engines/hold", {"by": by, "urls": _listed(urls)})

    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        return self._api.post(list[str], "/v1/engines/left", {"orders": dict(orders), "waited_s": waited_s})


class RemoteRuns(Runs):
    """Training runs through the API."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def keyed_batches(self, keys: Sequence[str]) -> Sequence[KeyedBatch]:
        return self._api.post(list[KeyedBatch], "/v1/keyed_batches", {"keys": list(keys)})

    def instances(self, group_ids: Sequence[str]) -> Sequence[Instance]:
        return self._api.post(list[Instance], "/v1/instances", {"group_ids": list(group_ids)})

    def record_step(self, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
        return self._api.post(RecordedStep, "/v1/steps", {"run": run, "step": step, "record": dict(record)})

    def recorded_step(self, run: str, up_to: int | None = None) -> RecordedStep | None:
        wanted = {"run": run} if up_to is None else {"run": run, "up_to": up_to}
        return next(iter(self._api.get(list[RecordedStep], "/v1/steps", **wanted)), None)

    def solve_rates(
        self,
        run: str,
        data_source: str,
        instance_ids: Sequence[str] | None = None,
        *,
        min_version: int | None = None,
        solved_at: float = 1.0,
    ) -> Sequence[SolveRate]:
        wanted = {"run": run, "data_source": data_source, "instance_ids": _listed(instance_ids)}
        window = {"min_version": min_version, "solved_at": solved_at}
        return self._api.post(list[SolveRate], "/v1/solve_rates", wanted | window)


def _of_batch(batch_id: str, rest: str = "") -> str:
    return f"/v1/batches/{_sound(batch_id)}{rest}"


def _of_rollout(rollout_id: str, rest: str = "") -> str:
    return f"/v1/rollouts/{_sound(rollout_id)}{rest}"


def _sound(id: str) -> str:
    """Return an id that can be part of a path. Raises NotFound for other texts."""
    RolloutRef.of(id)
    return id


def _of_any(id: str, rollout_ids: Collection[str] | None) -> dict[str, Any]:
    return {"id": _sound(id), "rollout_ids": _listed(rollout_ids)}


def _given(**query: object) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _listed(values: Collection[str] | None) -> list[str] | None:
    return None if values is None else list(values)


@dataclass(frozen=True, slots=True)
class MadeKey:
    """The response to a new key: its text, which is shown only once."""

    key: str


class RemoteAccess(AccessControl):
    """The verbs as requests to the API."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def add(self, new: NewKey) -> str:
        # not repeatable: a key whose text was lost on the way has to be revoked
        return self._api.post(MadeKey, "/v1/keys", new.model_dump(mode="json"), repeatable=False).key

    def keys(self) -> Sequence[ApiKey]:
        return self._api.pages(ApiKey, "/v1/keys", lambda key: key.name)

    def revoke_key(self, name: str) -> None:
        self._api.post(dict, "/v1/keys/revoke", {"name": name}, repeatable=False)

    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        older = {} if before is None else {"before": before}
        return self._api.get(list[LoggedOrder], "/v1/log", limit=limit, **older)

    def prune_orders(self, days: float) -> int:
        return self._api.post(int, "/v1/log/prune", {"days": days})


class RemoteAnnotations(AnnotationLog):
    """The verbs over HTTP."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        new = checked(NewAnnotations, {"producer": producer, "step": step, "annotations": list(annotations)})
        return self._api.post(int, "/v1/annotations", new.model_dump(mode="json", exclude_none=True))

    def of(self, rollout_id: str) -> Sequence[Annotation]:
        return self._api.get(list[Annotation], f"/v1/rollouts/{RolloutRef.of(rollout_id)}/annotations")


class RemoteBorrower(Borrower):
    """The verbs as requests to an API. Calls have ids, so each is executed once however often it is sent."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def begin(self, request: BorrowRequest) -> BorrowedSandbox:
        body = request.model_dump(mode="json", exclude_defaults=True)
        # without a name, a resent request would start a second sandbox
        return self._api.post(BorrowedSandbox, _PATH, body, repeatable=bool(request.name))

    def watched(self, reference: str, wait_s: float) -> BorrowedSandbox:
        return self._api.get(BorrowedSandbox, self._of(reference), wait_s=wait_s)

    def list(self, limit: int = 100, ended: bool = False, before: str | None = None) -> Sequence[BorrowedSandbox]:
        older: dict[str, Any] = {} if before is None else {"before": before}
        return self._api.get(list[BorrowedSandbox], _PATH, limit=limit, ended=str(ended).lower(), **older)

    def renew(self, reference: str, lease_s: float | None = None) -> BorrowedSandbox:
        return self._api.post(BorrowedSandbox, f"{self._of(reference)}/renew", {"lease_s": lease_s})

    def stop(self, reference: str) -> BorrowedSandbox:
        return self._api.post(BorrowedSandbox, f"{self._of(reference)}/stop", {})

    def call(self, reference: str, call: Request) -> Any:
        verb = VERBS[type(call)]
        body = call.model_dump(mode="json", exclude_defaults=True)
        wait_s, call_id = getattr(call, "timeout_s", 0.0), secrets.token_hex(16)
        return self._api.post(CALLS[verb][1], f"{self._of(reference)}/{verb}", body, wait_s=wait_s, call_id=call_id)

    @staticmethod
    def _of(reference: str) -> str:
        return f"{_PATH}/{quote(reference, safe='')}"
