"""The verbs of a farm: submit, status, stream, collect, cancel, rescore. Only here is a row paired with a hint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import IntegrityError

from farm.errors import InvalidRequest, NotFound, UnknownHandler
from farm.plugins import installed, load
from farm.request import BatchRequest, Instance
from farm.rollout import BatchStatus, Group, Rollout
from farm.signals import ENDED, Signals
from farm.store import artefacts, batches, engines, interventions, nodes, trajectories
from farm.store.artefacts import KeptArtefact
from farm.store.engine import Store

HANDLERS = "farm.handlers"
_PAGE = 256
_POLL_S = 0.5


class Service:
    """The verbs, on a store and its signals. Every method raises StoreUnavailable when the database is away."""

    def __init__(self, store: Store, signals: Signals) -> None:
        self.store = store
        self.signals = signals

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Check every instance, then write the batch: its id. The same idempotency key gives the same batch.

        Raises InvalidRequest naming the field, UnknownHandler, or Conflict; then nothing was started.
        """
        asked = _checked_request(request)
        self._check_instances(asked.instances)
        fingerprint = hashlib.sha256(asked.model_dump_json().encode()).hexdigest()
        try:
            batch_id, new = self.store.write(lambda connection: batches.create(connection, asked, fingerprint))
        except IntegrityError:  # the same key was submitted at the same moment; now it is there to be found
            batch_id, new = self.store.write(lambda connection: batches.create(connection, asked, fingerprint))
        if new:
            self.signals.wake()
        return batch_id

    def _check_instances(self, instances: Sequence[Instance]) -> None:
        for index, instance in enumerate(instances):
            path = f"instances[{index}]"
            if instance.data_source in installed(HANDLERS):
                _check_fields(load(HANDLERS, instance.data_source).instance_type, instance.fields, f"{path}.fields")
            elif not self._served(instance.data_source):
                names = ", ".join(sorted(installed(HANDLERS)))
                raise UnknownHandler(
                    f"{path}.data_source: no handler for {instance.data_source!r}; this farm has: {names}"
                )

    def _served(self, data_source: str) -> bool:
        """Whether some node has a handler that is not installed here; the node checks its instances then."""
        return any(data_source in node.handlers for node in self.store.read(nodes.listing))

    def status(self, batch_id: str) -> BatchStatus:
        """A batch in numbers. Raises NotFound."""
        return self.store.read(lambda connection: batches.status(connection, batch_id))

    def rollouts(self, batch_id: str) -> list[Rollout]:
        """All rollouts of a batch as they are now, without training rows."""
        found = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        if not found:
            raise NotFound(f"there is no batch {batch_id}")
        return found

    def stream(self, batch_id: str, cursor: int = 0, timeout_s: float | None = None) -> Iterator[Rollout]:
        """The rollouts of a batch as they end, with training rows, until all have; `rollout.cursor` resumes after one.

        Raises NotFound; TimeoutError when none ended for `timeout_s`.
        """
        for page in self._pages(batch_id, cursor, timeout_s, whole_groups=False):
            yield from page

    def stream_groups(self, batch_id: str, cursor: int = 0, timeout_s: float | None = None) -> Iterator[Group]:
        """As `stream`, in whole groups as their last rollout ends; `group.cursor` resumes after one."""
        for page in self._pages(batch_id, cursor, timeout_s, whole_groups=True):
            for group_index in dict.fromkeys(rollout.group_index for rollout in page):
                members = tuple(rollout for rollout in page if rollout.group_index == group_index)
                yield Group(members[0].group_id, members)

    def _pages(
        self, batch_id: str, cursor: int, timeout_s: float | None, whole_groups: bool
    ) -> Iterator[list[Rollout]]:
        listener = self.signals.listen(ENDED)
        since = time.monotonic()
        try:
            while True:
                done = self.status(batch_id).done
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
            while True:
                status = self.status(batch_id)
                if status.done:
                    return status
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"batch {batch_id}: {status.n_finished} of {status.n_rollouts} ended in {timeout_s:g} s"
                    )
                listener.wait(_POLL_S, lambda channel, ended: ended == batch_id)
        finally:
            listener.close()

    def cancel(self, batch_id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """End a batch, or these rollouts of it, now; the ids of those that had not ended. Harmless when repeated."""
        self.status(batch_id)
        ids = self.store.write(lambda connection: interventions.cancel(connection, batch_id, rollout_ids))
        if ids:
            self.signals.cancelled(ids)
            self.signals.ended(batch_id)
        return ids

    def rescore(self, batch_id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score again what was played to the end, from what was submitted then; the ids. Nothing is played again."""
        self.status(batch_id)
        ids = self.store.write(lambda connection: interventions.rescore(connection, batch_id, rollout_ids))
        if ids:
            self.signals.wake()
        return ids

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        """The artefacts of a rollout, without their bytes. Raises NotFound if there is no such rollout."""
        self.store.read(lambda connection: batches.rollout(connection, rollout_id))
        return self.store.read(lambda connection: artefacts.listing(connection, rollout_id))

    def artefact(self, rollout_id: str, name: str) -> bytes:
        """The bytes of an artefact. Raises NotFound."""
        return self.store.read(lambda connection: artefacts.contents(connection, rollout_id, name))

    def add_engine(self, url: str, model: str, key: str = "none") -> None:
        """Use an OpenAI-compatible server from now on."""
        self.store.write(lambda connection: engines.add(connection, engines.Engine(url, model, key)))

    def remove_engine(self, url: str) -> None:
        """Use it no more; what runs there goes on. Raises NotFound."""
        if not self.store.write(lambda connection: engines.remove(connection, url)):
            raise NotFound(f"there is no engine {url}")


def _checked_request(request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
    if isinstance(request, BatchRequest):
        return request
    try:
        return BatchRequest.model_validate(request)
    except ValidationError as error:
        raise _invalid(error, "") from error


def _check_fields(instance_type: type[BaseModel], fields: Mapping[str, Any], path: str) -> None:
    try:
        instance_type.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, path) from error


def _invalid(error: ValidationError, path: str) -> InvalidRequest:
    """The first complaint, with the field's whole path."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = path
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    more = error.error_count() - 1
    return InvalidRequest(first["msg"] + (f" (and {more} more)" if more else ""), field=field.lstrip("."))
