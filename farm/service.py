"""The verbs of a farm: submit, status, stream, collect, cancel, rescore. Only here is a row paired with a hint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import IntegrityError

from farm.deliveries import CONSUMER, Deliveries, Page, Watch, check_consumer
from farm.engines import Engines
from farm.errors import InvalidRequest, NotFound, UnknownHandler
from farm.plugins import installed, load
from farm.request import BatchRequest, Instance
from farm.rollout import BatchStatus, Reward, Rollout, Timing
from farm.signals import ENDED, Listener, Signals
from farm.store import artefacts, audit, batches, deliveries, interventions, nodes, trajectories
from farm.store.artefacts import KeptArtefact
from farm.store.audit import Conservation, Violation
from farm.store.engine import Store, Work
from farm.store.nodes import Node
from farm.target import Target
from farm.trajectory import ModelCall

T = TypeVar("T")

HANDLERS = "farm.handlers"
AGENTS = "farm.agents"
SANDBOXES = "farm.sandboxes"
PAGE = 256
"""Rollouts, or groups, that are given at a time."""
_POLL_S = 0.5


class Service(Deliveries):
    """The verbs, on a store and its signals; those for engines are in `engines`.

    Every method raises StoreUnavailable when the database is away.
    """

    def __init__(self, store: Store, signals: Signals, max_open: int) -> None:
        self.store = store
        self.signals = signals
        self.engines = Engines(store, signals)
        self._max_open = max_open

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Check every instance, then write the batch: its id. The same idempotency key gives the same batch.

        Raises InvalidRequest naming the field, UnknownHandler, Conflict or Overloaded; then nothing was started.
        """
        asked = checked_request(request)
        self._check_instances(asked.instances)
        _check_plugin(AGENTS, asked.agent, "agent", "")
        _check_plugin(SANDBOXES, asked.sandbox, "sandbox", "auto")
        create = partial(
            batches.create,
            request=asked,
            fingerprint=_fingerprint(asked),
            former_fingerprint=_former_fingerprint(asked),
            max_open=self._max_open,
            batch_id=batches.new_id(),
        )
        try:
            batch_id, new = self.store.write(create)
        except IntegrityError:  # the same key was submitted at the same moment; now it is there to be found
            batch_id, new = self.store.write(create)
        if new:
            self.signals.wake()
        return batch_id

    def _check_instances(self, instances: Sequence[Instance]) -> None:
        served: Collection[str] | None = None
        for index, instance in enumerate(instances):
            path = f"instances[{index}]"
            if instance.data_source in installed(HANDLERS):
                _check_fields(load(HANDLERS, instance.data_source).instance_type, instance.fields, f"{path}.fields")
                continue
            served = self._served() if served is None else served
            if instance.data_source not in served:
                names = ", ".join(sorted({*installed(HANDLERS), *served}))
                raise UnknownHandler(
                    f"{path}.data_source: no handler for {instance.data_source!r}; this farm has: {names}"
                )

    def _served(self) -> Collection[str]:
        """What some node has a handler for, installed here or not; the node checks its instances then."""
        return {handler for node in self.nodes() for handler in node.handlers}

    def nodes(self) -> Sequence[Node]:
        """All nodes, as their supervisors announced them; also those that died, until they come back."""
        return self.store.read(nodes.listing)

    def status(self, batch_id: str) -> BatchStatus:
        """A batch in numbers. Raises NotFound."""
        _named(batch_id, "batch")
        return self.store.read(lambda connection: batches.status(connection, batch_id))

    def rollouts(self, batch_id: str) -> list[Rollout]:
        """All rollouts of a batch as they are now, without training rows. Raises NotFound."""
        _named(batch_id, "batch")
        found = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        if not found:
            raise NotFound(f"there is no batch {batch_id}")
        return found

    def rollout(self, rollout_id: str) -> Rollout:
        """One rollout as it is now, without training rows. Raises NotFound."""
        _named(rollout_id, "rollout")
        return self.store.read(lambda connection: batches.rollout(connection, rollout_id))

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        """The model calls of a rollout's last attempt that has any. Raises NotFound."""
        self.rollout(rollout_id)
        return self.store.read(lambda connection: trajectories.calls(connection, rollout_id))

    def timings(self, rollout_id: str) -> Sequence[Timing]:
        """Every stage of every attempt of a rollout. Raises NotFound."""
        self.rollout(rollout_id)
        return self.store.read(lambda connection: batches.timings(connection, rollout_id))

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """The scores of a rollout, newest last. Raises NotFound."""
        self.rollout(rollout_id)
        return self.store.read(lambda connection: batches.rewards_of(connection, rollout_id))

    def conservation(self, batch_id: str) -> Conservation:
        """Submitted against ended and in flight, of a batch and each of its groups. Raises NotFound."""
        _named(batch_id, "batch")
        return self.store.read(lambda connection: audit.conservation(connection, batch_id))

    def violations(self, batch_id: str) -> Sequence[Violation]:
        """What must never be true of a batch, and is. Raises NotFound."""
        _named(batch_id, "batch")
        return self.store.read(lambda connection: audit.violations(connection, batch_id))

    def recent(self, limit: int = 20) -> list[str]:
        """The ids of the newest batches, newest first."""
        return self.store.read(lambda connection: batches.recent(connection, limit))

    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        """Note that a consumer has dealt with all that ended up to a cursor; how far it has come.

        It never moves back. Raises NotFound, and InvalidRequest for a cursor that was never given out.
        """
        check_consumer(consumer)
        _named(batch_id, "batch")
        return self.store.write(lambda connection: deliveries.acknowledge(connection, batch_id, consumer, cursor))

    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """The cursor after which a consumer's streams go on; 0 if it has acknowledged nothing. Raises NotFound."""
        self.status(batch_id)
        check_consumer(consumer)
        return self.store.read(lambda connection: deliveries.acknowledged(connection, batch_id, consumer))

    def page(self, batch_id: str, cursor: int, whole_groups: bool = False, limit: int = PAGE) -> Page:
        """So many of the rollouts, or of the whole groups, that ended after a cursor; nothing is waited for.

        Raises NotFound.
        """
        done = not self.has_open(batch_id)
        if whole_groups:
            groups = self.store.read(lambda connection: batches.groups_after(connection, batch_id, cursor, limit))
            found = [rollout for group in groups for rollout in group]
        else:
            found = self.store.read(lambda connection: batches.ended_after(connection, batch_id, cursor, limit))
        if not found:
            return Page((), done)
        ids = [rollout.rollout_id for rollout in found]
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id, ids))
        return Page(tuple(batches.with_segments(found, rows)), done)

    @contextmanager
    def _watch(self, batch_id: str) -> Iterator[Watch]:
        listener = self.signals.listen(ENDED)
        try:
            yield _StoreWatch(self, batch_id, listener)
        finally:
            listener.close()

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """All rollouts of a batch with their training rows, by group and sample, once all have ended.

        Raises NotFound; TimeoutError when they have not ended after `timeout_s` (0 asks without waiting).
        """
        self.wait(batch_id, timeout_s)
        found = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id))
        return batches.with_segments(found, rows)

    def has_open(self, batch_id: str) -> bool:
        """Whether some rollout of a batch has not ended. Asked at every hint: there is one for each that ends.

        Raises NotFound.
        """
        _named(batch_id, "batch")
        return self.store.read(lambda connection: batches.has_open(connection, batch_id))

    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """End a batch, a group (`batch.group`) or a rollout, or these rollouts of it; the ids that had not ended.

        Harmless when repeated, and of what has ended. Raises NotFound; then nothing was cancelled.
        """
        target = Target.of(id)
        chosen = None if rollout_ids is None else [str(_named(each, "rollout")) for each in rollout_ids]
        ids = self._changed(lambda connection: interventions.cancel(connection, target, chosen))
        if ids:
            # a try that was not made after all may have named some that somebody else ended since
            ids = self.store.read(lambda connection: interventions.cancelled_of(connection, ids))
            self.signals.cancelled(ids)
            self.signals.ended(target.batch_id)
        return ids

    def _changed(self, work: Work[list[str]]) -> list[str]:
        """Write, and say what was changed: also by a try whose commit was made but not answered."""
        ids: dict[str, None] = {}
        self.store.write(lambda connection: ids.update(dict.fromkeys(work(connection))))
        return list(ids)

    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score again what was played to the end, from what was submitted then; the ids. Nothing is played again.

        `id` and `rollout_ids` as in `cancel`. Raises NotFound.
        """
        target = Target.of(id)
        chosen = None if rollout_ids is None else [str(_named(each, "rollout")) for each in rollout_ids]
        ids = self._changed(lambda connection: interventions.rescore(connection, target, chosen))
        if ids:
            self.signals.wake()
        return ids

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        """The artefacts of a rollout, without their bytes. Raises NotFound if there is no such rollout."""
        self.rollout(rollout_id)
        return self.store.read(lambda connection: artefacts.listing(connection, rollout_id))

    def artefact(self, rollout_id: str, name: str) -> bytes:
        """The bytes of an artefact. Raises NotFound."""
        self.rollout(rollout_id)
        if "\0" in name:
            raise NotFound(f"rollout {rollout_id} has no artefact {name!r}")
        return self.store.read(lambda connection: artefacts.contents(connection, rollout_id, name))

    def close(self) -> None:
        self.signals.close()
        self.store.close()


class _StoreWatch:
    """Looks into the store at every hint that something ended, and without hints by itself."""

    def __init__(self, service: Service, batch_id: str, listener: Listener) -> None:
        self._service = service
        self._batch_id = batch_id
        self._listener = listener

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        ask = partial(self._service.page, self._batch_id, cursor, whole_groups)
        return self._awaited(ask, lambda page: page.settled, wait_s)

    def has_open(self, wait_s: float) -> bool:
        return self._awaited(lambda: self._service.has_open(self._batch_id), lambda is_open: not is_open, wait_s)

    def _awaited(self, ask: Callable[[], T], settled: Callable[[T], bool], wait_s: float) -> T:
        deadline = time.monotonic() + wait_s
        while True:
            found = ask()
            left_s = deadline - time.monotonic()
            if settled(found) or left_s <= 0:
                return found
            self._listener.wait(min(_POLL_S, left_s), lambda channel, ended: ended == self._batch_id)


def _named(text: str, kind: str) -> Target:
    """What an id names, if it is of that kind. Raises NotFound."""
    target = Target.of(text)
    if target.kind != kind:
        raise NotFound(f"{text} names a {target.kind}, not a {kind}")
    return target


def _fingerprint(request: BatchRequest) -> str:
    """Tells one request from another. What is left at its default is not in it: it may be new to the farm."""
    return hashlib.sha256(request.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def _former_fingerprint(request: BatchRequest) -> str:
    """What told it from others until these two settings were new; empty if that could not ask for the same."""
    new = {name: BatchRequest.model_fields[name].default for name in ("max_losses", "quarantine_after")}
    if request.idempotency_key is None or any(getattr(request, name) != value for name, value in new.items()):
        return ""
    return hashlib.sha256(request.model_dump_json(exclude=set(new)).encode()).hexdigest()


def checked_request(request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
    """Raises InvalidRequest naming the field."""
    if isinstance(request, BatchRequest):
        return request
    try:
        return BatchRequest.model_validate(request)
    except ValidationError as error:
        raise invalid(error, "") from None


def _check_plugin(group: str, name: str, field: str, any_of_them: str) -> None:
    if name != any_of_them and name not in installed(group):
        names = ", ".join(sorted(installed(group)))
        raise InvalidRequest(f"there is no {field} {name!r}; installed here: {names}", field=field)


def _check_fields(instance_type: type[BaseModel], fields: Mapping[str, Any], path: str) -> None:
    try:
        instance_type.model_validate(fields)
    except ValidationError as error:
        raise invalid(error, path) from None
    except Exception as error:
        raise InvalidRequest(f"its handler could not read it: {type(error).__name__}: {error}", field=path) from error


def invalid(error: ValidationError, path: str = "") -> InvalidRequest:
    """The first complaint, with the field's whole path."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = path
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    more = error.error_count() - 1
    said = first["msg"].removeprefix("Value error, ") + (f" (and {more} more)" if more else "")
    return InvalidRequest(said, field=field.lstrip(".") or "request")
