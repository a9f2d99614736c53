"""The verbs of a farm over HTTP: as `farm.service`, with its types and its errors, by way of an API."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from farm.connection import PATIENCE_S, Connection
from farm.deliveries import CONSUMER, Deliveries, Page, Watch, check_consumer
from farm.engines import EngineState
from farm.orders import Orders
from farm.request import BatchRequest
from farm.rollout import BatchStatus, Reward, Rollout, Timing
from farm.service import checked_request
from farm.signals import Signals
from farm.store.artefacts import KeptArtefact
from farm.store.audit import Conservation, Violation
from farm.store.engines import Engine, Paused
from farm.store.nodes import Node
from farm.target import Target
from farm.trajectory import ModelCall

_ROLLOUTS, _GROUPS = 64, 8
"""What a page holds at most; a group may be large."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What a submit is answered with."""

    batch_id: str


class Remote(Deliveries):
    """The verbs, asked of the API at an address; those for engines are in `engines`.

    An API that is away is waited for as a store waits for its database; then every method raises FarmUnreachable.
    """

    def __init__(self, url: str, key: str = "", patience_s: float = PATIENCE_S) -> None:
        self._api = Connection(url, key.strip(), patience_s)
        self.engines = RemoteEngines(self._api)

    def check(self) -> None:
        """Raises FarmUnreachable, StoreUnavailable, or NotAllowed for a wrong key."""
        self._api.get(dict, "/healthz")

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """As `Service.submit`. Exactly one batch comes of it, also if the API dies before it has answered."""
        asked = checked_request(request)
        if asked.idempotency_key is None:
            # what may have to be sent again must be known again
            asked = asked.model_copy(update={"idempotency_key": f"submit-{secrets.token_hex(16)}"})
        body = asked.model_dump(mode="json", exclude_defaults=True)
        return self._api.post(Submitted, "/v1/batches", body).batch_id

    def recent(self, limit: int = 20) -> list[str]:
        return self._api.get(list[str], "/v1/batches", limit=limit)

    def status(self, batch_id: str) -> BatchStatus:
        return self._api.get(BatchStatus, _of_batch(batch_id))

    def rollouts(self, batch_id: str) -> list[Rollout]:
        return self._api.get(list[Rollout], _of_batch(batch_id, "/rollouts"))

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
    def _watch(self, batch_id: str) -> Iterator[Watch]:
        yield _RemoteWatch(self._api, batch_id)

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """As `Service.collect`, a page at a time."""
        self.wait(batch_id, timeout_s)
        watch, found, cursor = _RemoteWatch(self._api, batch_id), dict[str, Rollout](), 0
        while page := watch.page(cursor, False, 0.0).rollouts:
            # one that is scored again meanwhile comes again
            found.update((rollout.rollout_id, rollout) for rollout in page)
            cursor = page[-1].cursor
        return sorted(found.values(), key=lambda rollout: (rollout.group_index, rollout.sample_index))

    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """As `Service.cancel`. If the API dies before it has answered, those that it ended first are not named."""
        return self._api.post(list[str], "/v1/cancel", _of_any(id, rollout_ids))

    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """As `Service.rescore`. FarmUnreachable if the API dies meanwhile: it is not known then what was begun."""
        return self._api.post(list[str], "/v1/rescore", _of_any(id, rollout_ids), repeatable=False)

    def rollout(self, rollout_id: str) -> Rollout:
        return self._api.get(Rollout, _of_rollout(rollout_id))

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        return self._api.get(list[ModelCall], _of_rollout(rollout_id, "/calls"))

    def timings(self, rollout_id: str) -> Sequence[Timing]:
        return self._api.get(list[Timing], _of_rollout(rollout_id, "/timings"))

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        return self._api.get(list[Reward], _of_rollout(rollout_id, "/rewards"))

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        return self._api.get(list[KeptArtefact], _of_rollout(rollout_id, "/artefacts"))

    def artefact(self, rollout_id: str, name: str) -> bytes:
        return self._api.data(_of_rollout(rollout_id, "/artefact"), name=name)

    def nodes(self) -> Sequence[Node]:
        return self._api.get(list[Node], "/v1/nodes")

    def close(self) -> None:
        self._api.close()


class _RemoteWatch:
    """Long polls: the API answers when there is something, or when it has waited long enough."""

    def __init__(self, api: Connection, batch_id: str) -> None:
        self._api = api
        self._batch_id = batch_id

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        limit = _GROUPS if whole_groups else _ROLLOUTS
        path = _of_batch(self._batch_id, "/ended")
        return self._api.get(Page, path, cursor=cursor, groups=whole_groups, limit=limit, wait_s=wait_s)

    def has_open(self, wait_s: float) -> bool:
        return self._api.get(bool, _of_batch(self._batch_id, "/open"), wait_s=wait_s)


class RemoteEngines(Orders):
    """The verbs for engines, as `farm.engines`. It is this client that waits until orders are followed."""

    def __init__(self, api: Connection) -> None:
        super().__init__(Signals(""))
        self._api = api

    def add(self, engine: Engine) -> None:
        told = {name: getattr(engine, name) for name in ("url", "model", "key", "tokenizer", "tool_format")}
        self._api.post(dict, "/v1/engines", told)

    def drain(self, url: str) -> None:
        self._api.post(dict, "/v1/engines/drain", {"url": url})

    def remove(self, url: str) -> None:
        # repeated, it might take away what somebody has added since
        self._api.post(dict, "/v1/engines/remove", {"url": url}, repeatable=False)

    def clear(self) -> int:
        return self._api.post(int, "/v1/engines/clear", repeatable=False)

    def states(self) -> list[EngineState]:
        return self._api.get(list[EngineState], "/v1/engines")

    def chosen(self, urls: Collection[str] | None = None) -> list[Engine]:
        return self._api.post(list[Engine], "/v1/engines/chosen", {"urls": _listed(urls)})

    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None) -> dict[str, int]:
        return self._api.post(dict[str, int], "/v1/engines/pause", {"mode": paused, "by": by, "urls": _listed(urls)})

    def order_version(self, version: str, urls: Collection[str] | None) -> dict[str, int]:
        return self._api.post(dict[str, int], "/v1/engines/version", {"version": version, "urls": _listed(urls)})

    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        return self._api.post(list[str], "/v1/engines/left", {"orders": dict(orders), "waited_s": waited_s})


def _of_batch(batch_id: str, rest: str = "") -> str:
    return f"/v1/batches/{_sound(batch_id)}{rest}"


def _of_rollout(rollout_id: str, rest: str = "") -> str:
    return f"/v1/rollouts/{_sound(rollout_id)}{rest}"


def _sound(id: str) -> str:
    """Only what can be an id becomes part of a path. Raises NotFound."""
    Target.of(id)
    return id


def _of_any(id: str, rollout_ids: Collection[str] | None) -> dict[str, Any]:
    return {"id": _sound(id), "rollout_ids": _listed(rollout_ids)}


def _listed(values: Collection[str] | None) -> list[str] | None:
    return None if values is None else list(values)
