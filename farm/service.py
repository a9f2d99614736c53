"""The verbs of a farm: submit, status, stream, collect, cancel, rescore. Only here is a row paired with a hint."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import IntegrityError

from farm.engines import Engines
from farm.errors import InvalidRequest, NotFound, UnknownHandler
from farm.plugins import installed, load
from farm.request import BatchRequest, Instance
from farm.rollout import BatchStatus, Group, Reward, Rollout, Timing
from farm.signals import ENDED, Signals
from farm.store import artefacts, audit, batches, deliveries, interventions, nodes, trajectories
from farm.store.artefacts import KeptArtefact
from farm.store.audit import Conservation, Violation
from farm.store.engine import Store, Work
from farm.store.nodes import Node
from farm.target import Target
from farm.trajectory import ModelCall

HANDLERS = "farm.handlers"
AGENTS = "farm.agents"
SANDBOXES = "farm.sandboxes"
CONSUMER = "trainer"
"""Who streams and acknowledges, unless it says otherwise."""
_CONSUMER = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PAGE = 256
_POLL_S = 0.5


class Service:
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
        asked = _checked_request(request)
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

    def acknowledge(self, given: Rollout | Group, consumer: str = CONSUMER) -> int:
        """Note that a consumer has dealt with this and all that its stream gave before; how far it has come.

        Harmless when repeated, and when what was acknowledged later came first: it never moves back. Raises NotFound,
        and InvalidRequest for what has not ended.
        """
        if not given.cursor:
            raise InvalidRequest("it has not ended, so nobody was given it", field="rollout")
        batch_id, cursor = Target.of(given.group_id).batch_id, given.cursor
        _check_consumer(consumer)
        return self.store.write(lambda connection: deliveries.acknowledge(connection, batch_id, consumer, cursor))

    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """The cursor after which a consumer's streams go on; 0 if it has acknowledged nothing. Raises NotFound."""
        self.status(batch_id)
        _check_consumer(consumer)
        return self.store.read(lambda connection: deliveries.acknowledged(connection, batch_id, consumer))

    def stream(
        self, batch_id: str, cursor: int | None = None, timeout_s: float | None = None, consumer: str = CONSUMER
    ) -> Iterator[Rollout]:
        """The rollouts of a batch as they end, with training rows, until all have.

        They begin after a cursor (0: with the first that ended), without one after what the consumer has acknowledged.
        One that is scored again ends again, and comes again. Raises NotFound; TimeoutError when none ended for
        `timeout_s`.
        """
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=False):
            yield from page

    def stream_groups(
        self, batch_id: str, cursor: int | None = None, timeout_s: float | None = None, consumer: str = CONSUMER
    ) -> Iterator[Group]:
        """As `stream`, in whole groups as their last rollout ends."""
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=True):
            for group_index in dict.fromkeys(rollout.group_index for rollout in page):
                members = tuple(rollout for rollout in page if rollout.group_index == group_index)
                yield Group(members[0].group_id, members)

    def _pages(
        self, batch_id: str, cursor: int | None, timeout_s: float | None, consumer: str, whole_groups: bool
    ) -> Iterator[list[Rollout]]:
        acknowledged = self.acknowledged(batch_id, consumer)
        if cursor is None:
            cursor = acknowledged
        listener = self.signals.listen(ENDED)
        since = time.monotonic()
        try:
            while True:
                done = not self._has_open(batch_id)
                page = self._page(batch_id, cursor, whole_groups)
                if page:
                    cursor = max(rollout.cursor for rollout in page)
                    since = time.monotonic()
                    yield page
                    continue
                if done:
                    return
                if timeout_s is not None and time.monotonic() - since > timeout_s:
                    raise TimeoutError(f"batch {batch_id}: nothing ended for {timeout_s:g} s (cursor {cursor})")
                listener.wait(_POLL_S, lambda channel, ended: ended == batch_id)
        finally:
            listener.close()

    def _page(self, batch_id: str, cursor: int, whole_groups: bool) -> list[Rollout]:
        if whole_groups:
            groups = self.store.read(lambda connection: batches.groups_after(connection, batch_id, cursor, _PAGE))
            found = [rollout for group in groups for rollout in group]
        else:
            found = self.store.read(lambda connection: batches.ended_after(connection, batch_id, cursor, _PAGE))
        if not found:
            return []
        ids = [rollout.rollout_id for rollout in found]
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id, ids))
        return batches.with_segments(found, rows)

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """All rollouts of a batch with their training rows, by group and sample, once all have ended.

        Raises NotFound; TimeoutError when they have not ended after `timeout_s` (0 asks without waiting).
        """
        self.wait(batch_id, timeout_s)
        found = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id))
        return batches.with_segments(found, rows)

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until all rollouts of a batch have ended. Raises NotFound, TimeoutError."""
        listener = self.signals.listen(ENDED)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            status = self.status(batch_id)
            while self._has_open(batch_id):
                if deadline is not None and time.monotonic() >= deadline:
                    status = self.status(batch_id)
                    raise TimeoutError(
                        f"batch {batch_id}: {status.n_finished} of {status.n_rollouts} ended in {timeout_s:g} s"
                    )
                listener.wait(_POLL_S, lambda channel, ended: ended == batch_id)
            return status if status.done else self.status(batch_id)
        finally:
            listener.close()

    def _has_open(self, batch_id: str) -> bool:
        """Asked at every hint, and there is one for each rollout that ends."""
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


def _named(text: str, kind: str) -> Target:
    """What an id names, if it is of that kind. Raises NotFound."""
    target = Target.of(text)
    if target.kind != kind:
        raise NotFound(f"{text} names a {target.kind}, not a {kind}")
    return target


def _check_consumer(consumer: str) -> None:
    if not _CONSUMER.fullmatch(consumer):
        raise InvalidRequest("1 to 64 of A-Z, a-z, 0-9, '.', '_', ':' and '-'", field="consumer")


def _fingerprint(request: BatchRequest) -> str:
    """Tells one request from another. What is left at its default is not in it: it may be new to the farm."""
    return hashlib.sha256(request.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def _former_fingerprint(request: BatchRequest) -> str:
    """What told it from others until these two settings were new; empty if that could not ask for the same."""
    new = {name: BatchRequest.model_fields[name].default for name in ("max_losses", "quarantine_after")}
    if request.idempotency_key is None or any(getattr(request, name) != value for name, value in new.items()):
        return ""
    return hashlib.sha256(request.model_dump_json(exclude=set(new)).encode()).hexdigest()


def _checked_request(request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
    if isinstance(request, BatchRequest):
        return request
    try:
        return BatchRequest.model_validate(request)
    except ValidationError as error:
        raise _invalid(error, "") from None


def _check_plugin(group: str, name: str, field: str, any_of_them: str) -> None:
    if name != any_of_them and name not in installed(group):
        names = ", ".join(sorted(installed(group)))
        raise InvalidRequest(f"there is no {field} {name!r}; installed here: {names}", field=field)


def _check_fields(instance_type: type[BaseModel], fields: Mapping[str, Any], path: str) -> None:
    try:
        instance_type.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, path) from None
    except Exception as error:
        raise InvalidRequest(f"its handler could not read it: {type(error).__name__}: {error}", field=path) from error


def _invalid(error: ValidationError, path: str) -> InvalidRequest:
    """The first complaint, with the field's whole path."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = path
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    more = error.error_count() - 1
    said = first["msg"].removeprefix("Value error, ") + (f" (and {more} more)" if more else "")
    return InvalidRequest(said, field=field.lstrip(".") or "request")
