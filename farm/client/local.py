"""A farm through its store: the verbs as reads and writes with their notifications, which only this module sends."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from farm.callers import ApiKey, LoggedOrder, current_caller, sorted_scopes
from farm.client import request_checks as checks
from farm.client.consumer_stream import CONSUMER, BatchWatch, Page, check_consumer
from farm.client.farm import Farm
from farm.client.request_checks import checked
from farm.client.sandboxes.local_borrower import LocalBorrower
from farm.client.verb_groups import (
    PART_BYTES,
    AccessControl,
    AnnotationLog,
    ArchiveState,
    LogPruning,
    NewKey,
    Runs,
)
from farm.client.weight_update import WeightUpdateOrders
from farm.configuration.service_urls import normal_url
from farm.errors import FarmUnreachable, InvalidRequest, NotFound, StoreWentBack
from farm.home import WAIT_TIMEOUT_S, address_of
from farm.ids import RolloutRef, new_batch_id
from farm.notifications import ACKNOWLEDGED, ENDED, Listener, Signals
from farm.records.engine_state import EngineState, EngineUse, Paused, StoredEngine, is_reserved, troubles
from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
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
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate, check_run
from farm.records.trajectory import ModelCall
from farm.records.values import size_of
from farm.settings import settings
from farm.store import batches, cancel_and_rescore, consumers, llm_engines, migrations, nodes, trajectories
from farm.store.access import api_keys, audit_log
from farm.store.access.api_keys import check_own
from farm.store.access.audit_log import logged
from farm.store.access.sealed_secrets import SecretKey
from farm.store.blobs import artefacts, stored_annotations, stored_archives, stored_experts
from farm.store.database import Store, Work
from farm.store.node_names import is_here
from farm.store.reports import audit, summaries
from farm.task_archive import MAX_ARCHIVE_BYTES, PartStream, check

T = TypeVar("T")
log = logging.getLogger(__name__)

PAGE = 256
"""Rollouts, or groups, per page."""
_POLL_S = 0.5
_MAX_RECORD_BYTES = 16_000_000
_DIGEST = re.compile(r"[0-9a-f]{64}")
# tar adds a header and padding to each file
_MAX_PARTS = 2 * MAX_ARCHIVE_BYTES // PART_BYTES
_MAX_SEEN = 10_000
"""Batches remembered as seen: a long-lived service sees many."""

_FORMS = {"batch": "BATCH", "group": "BATCH.GROUP", "rollout": "BATCH.GROUP.SAMPLE"}


def open_store(
    url: str | Path | None = None, patience_s: float = WAIT_TIMEOUT_S, first_s: float | None = None
) -> tuple[Store, str]:
    """Open the store of a farm; return it and its broker's URL. `first_s` and errors as in `farm.connect`."""
    store_url, broker_url = address_of(url, settings())
    store = Store(store_url, patience_s)
    try:
        migrations.check(store, first_s)
    except BaseException:
        store.close()
        raise
    return store, broker_url


def _written(store: Store, work: Work[T]) -> T:
    """Write. If another process inserts the same row at the same moment, write again: now the row can be read."""
    try:
        return store.write(work)
    except IntegrityError:
        return store.write(work)


class LocalFarm(Farm):
    """The verbs on a store and its signals. `workers_s` is how long an order waits for a first sign of a worker."""

    def __init__(self, store: Store, signals: Signals, max_open: int, workers_s: float = 5.0) -> None:
        own = settings()
        self.store = store
        self.signals = signals
        self.orders = LocalOrders(store, signals, workers_s)
        self.runs = LocalRuns(store)
        self.sandboxes: LocalBorrower = LocalBorrower(store, signals, own.max_sandboxes)
        self.access = LocalAccess(store)
        self.annotations = LocalAnnotations(store)
        self.secret_key = SecretKey.of(own, store.engine.url)
        self._home = own.home.absolute()
        self._webhook_hosts = own.webhook_hosts
        self._max_open = max_open
        self._seen: dict[str, int] = {}

    @classmethod
    def opened(cls, url: str | Path | None, broker_url: str | None, first_s: float) -> LocalFarm:
        """Connect to the farm at an address; see `farm.connect`."""
        store, found_broker = open_store(url, first_s=first_s)
        return cls(store, Signals(found_broker if broker_url is None else broker_url), settings().max_open)

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        batch_request = checks.with_findings(checks.checked_request(request), self._home)
        checks.check_instances(batch_request, self._served, lambda: self.store.read(llm_engines.listing))
        checks.check_plugins(batch_request)
        checks.check_images(batch_request, self._are_here)
        checks.check_webhook(batch_request.webhook, self._webhook_hosts, current_caller())
        create = partial(
            batches.create,
            request=batch_request,
            fingerprint=checks.fingerprint(batch_request),
            secret_key=self.secret_key,
            max_open=self._max_open,
            batch_id=new_batch_id(),
            caller=current_caller(),
        )
        size = f"{len(batch_request.instances)} x {batch_request.n_samples} rollouts"
        write = logged(create, "submit", lambda created: created[0], size, done=lambda created: created[1])
        batch_id, new = _written(self.store, write)
        if new:
            self.signals.wake()
        self._saw(batch_id, self._seen.get(batch_id, 0))
        return batch_id

    def archive_state(self, digest: str) -> ArchiveState:
        _check_digest(digest)
        n_parts, parts = self.store.read(partial(stored_archives.state, digest=digest))
        return ArchiveState(n_parts is not None, () if n_parts is not None else tuple(parts))

    def put_archive_part(self, digest: str, number: int, data: bytes) -> None:
        _check_digest(digest)
        if not 0 <= number < _MAX_PARTS or not 0 < len(data) <= PART_BYTES:
            raise InvalidRequest(
                f"part {number} of {len(data)} bytes: there may be {_MAX_PARTS} of {PART_BYTES} bytes", field="part"
            )
        write = partial(stored_archives.put_part, digest=digest, number=number, data=artefacts.packed(data))
        write = partial(write, n_bytes=len(data))
        _written(self.store, write)

    def complete_archive(self, digest: str, n_parts: int) -> None:
        _check_digest(digest)
        known, _ = self.store.read(partial(stored_archives.state, digest=digest))
        n_bytes = 0
        if known is None:
            stream = PartStream(
                lambda number: self.store.read(partial(stored_archives.part, digest=digest, number=number))
            )
            try:
                check(stream.buffered())
                if stream.digest() != digest or stream.n_parts != n_parts:
                    raise InvalidRequest(
                        f"the {stream.n_parts} stored parts are not the archive {digest}: upload it again",
                        field="digest",
                    )
            except InvalidRequest:
                self.store.write(partial(stored_archives.drop, digest=digest))
                raise
            n_bytes = stream.n_bytes
        write = partial(stored_archives.complete, digest=digest, n_parts=n_parts, n_bytes=n_bytes)
        _written(self.store, write)

    def _served(self) -> Collection[str]:
        """Return the handlers of all nodes, installed here or not; nodes check instances of the others."""
        return {handler for node in self.nodes() for handler in node.handlers}

    def _are_here(self) -> bool:
        return bool(known := self.nodes()) and all(is_here(node, self._home) for node in known)

    def nodes(self) -> Sequence[Node]:
        return self.store.read(nodes.listing)

    def status(self, batch_id: str) -> BatchStatus:
        _named(batch_id, "batch")
        batch_status = self._of_batch(batch_id, lambda connection: batches.status(connection, batch_id))
        return batch_status if batch_status.done else replace(batch_status, warnings=self._engine_warnings(batch_id))

    def rollouts(self, batch_id: str) -> list[Rollout]:
        _named(batch_id, "batch")
        rollouts = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        if not rollouts:
            raise NotFound(f"there is no batch {batch_id}")
        return rollouts

    def rollouts_after(self, batch_id: str, after: str | None, limit: int) -> list[Rollout]:
        """Return the first rollouts of a batch, or those after `after`. Raises NotFound."""
        self._progress(batch_id)
        last = None if after is None else _named(after, "rollout")
        return self.store.read(lambda connection: batches.rollouts_of(connection, batch_id, last, limit))

    def rollout(self, rollout_id: str) -> Rollout:
        _named(rollout_id, "rollout")
        return self.store.read(lambda connection: batches.rollout(connection, rollout_id))

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        self.rollout(rollout_id)
        return self.store.read(lambda connection: trajectories.calls(connection, rollout_id))

    def timings(self, rollout_id: str) -> Sequence[Timing]:
        self.rollout(rollout_id)
        return self.store.read(lambda connection: batches.timings(connection, rollout_id))

    def stage_times(self, batch_id: str) -> Sequence[StageTimes]:
        self.status(batch_id)
        return self.store.read(lambda connection: summaries.stage_times(connection, batch_id))

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        self.rollout(rollout_id)
        return self.store.read(lambda connection: batches.rewards_of(connection, rollout_id))

    def conservation(self, batch_id: str) -> Conservation:
        _named(batch_id, "batch")
        return self.store.read(lambda connection: audit.conservation(connection, batch_id))

    def violations(self, batch_id: str) -> Sequence[Violation]:
        _named(batch_id, "batch")
        return self.store.read(lambda connection: audit.violations(connection, batch_id))

    def batches(self, limit: int = 20, before: str | None = None) -> list[BatchSummary]:
        return self.store.read(lambda connection: summaries.newest(connection, limit, before))

    def recent(self, limit: int = 20) -> list[str]:
        return self.store.read(lambda connection: batches.recent(connection, limit))

    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        check_consumer(consumer)
        _named(batch_id, "batch")
        caller = current_caller()

        def acknowledge(connection: Connection) -> int:
            check_own(connection, caller, batch_id)
            return consumers.acknowledge(connection, batch_id, consumer, cursor)

        return self.store.write(acknowledge)

    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        check_consumer(consumer)
        self._progress(batch_id)
        return self.store.read(lambda connection: consumers.acknowledged(connection, batch_id, consumer))

    def page(self, batch_id: str, cursor: int, whole_groups: bool = False, limit: int = PAGE) -> Page:
        """Return up to `limit` rollouts, or whole groups, that ended after a cursor, without waiting.

        Raises NotFound, and StoreWentBack for a cursor beyond the batch's last.
        """
        last, is_open = self._progress(batch_id)
        if cursor > last:
            raise StoreWentBack(
                f"batch {batch_id} has no cursor beyond {last}, and {cursor} was given: unless it is "
                "another batch's, the database went back in time; continue with cursor 0 or the acknowledged one"
            )
        # the last page of a batch is read again: a rescored rollout may have ended between the two queries
        if cursor == last and is_open:
            return Page((), False)
        if whole_groups:
            groups = self.store.read(lambda connection: batches.groups_after(connection, batch_id, cursor, limit))
        else:
            ended = self.store.read(lambda connection: batches.ended_after(connection, batch_id, cursor, limit))
            groups = [[rollout] for rollout in ended]
        rollouts = self.store.read(lambda connection: stored_experts.first_fitting(connection, groups))
        if not rollouts:
            return Page((), not is_open)
        ids = [rollout.rollout_id for rollout in rollouts]
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id, ids, experts=True))
        return Page(tuple(batches.with_segments(rollouts, rows)), not is_open)

    def _engine_warnings(self, batch_id: str) -> tuple[str, ...]:
        """Return why the batch's engines get no calls without intervention; empty for other engines than the farm's."""
        model = str(self.store.read(lambda connection: batches.request_of(connection, batch_id)).get("model", ""))
        warnings = troubles(self.store.read(llm_engines.listing), model)
        if warnings and not self.store.read(lambda connection: batches.needs_engine(connection, batch_id)):
            return ()
        return warnings

    @contextmanager
    def _watch(self, batch_id: str) -> Iterator[BatchWatch]:
        listener = self.signals.listen(ENDED)
        try:
            yield _StoreWatch(self, batch_id, listener)
        finally:
            listener.close()

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        self.wait(batch_id, timeout_s)
        rollouts = self.store.read(lambda connection: batches.rollouts_of(connection, batch_id))
        rows = self.store.read(lambda connection: trajectories.segments_of(connection, batch_id, experts=True))
        return batches.with_segments(rollouts, rows)

    def has_open(self, batch_id: str) -> bool:
        """Return whether some rollout of a batch has not ended; called for each notification. Raises NotFound."""
        return self._progress(batch_id)[1]

    def _progress(self, batch_id: str) -> tuple[int, bool]:
        """Return the last cursor of a batch and whether it has open rollouts; log once if the cursor went back."""
        _named(batch_id, "batch")
        progress = self._of_batch(batch_id, lambda connection: batches.progress(connection, batch_id))
        if progress[0] < self._seen.get(batch_id, 0):
            log.error(
                "ALARM batch %s has come to number %d, and was at %d: the database went back in time, and what ended "
                "since runs again",
                *(batch_id, progress[0], self._seen.get(batch_id)),
            )
        self._saw(batch_id, progress[0])
        return progress

    def _saw(self, batch_id: str, last: int) -> None:
        self._seen[batch_id] = last
        if len(self._seen) > 2 * _MAX_SEEN:
            for old in list(self._seen)[:_MAX_SEEN]:
                self._seen.pop(old, None)

    def _of_batch(self, batch_id: str, ask: Work[T]) -> T:
        """Run a query on a batch. Raises StoreWentBack if the batch existed before and no longer does."""
        try:
            return self.store.read(ask)
        except NotFound:
            if batch_id not in self._seen:
                raise
            raise StoreWentBack(
                f"batch {batch_id} existed and is gone: the database went back in time, e.g. by a "
                "restored backup; submit the batch again"
            ) from None

    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        target = RolloutRef.of(id)
        chosen = None if rollout_ids is None else [str(_named(each, "rollout")) for each in rollout_ids]
        ids = self._changed("cancel", target, lambda connection: cancel_and_rescore.cancel(connection, target, chosen))
        if ids:
            # a try that failed may have named rollouts that another process has ended since
            ids = self.store.read(lambda connection: cancel_and_rescore.cancelled_of(connection, ids))
            self.signals.cancelled(ids)
            self.signals.ended(target.batch_id)
        return ids

    def _changed(self, verb: str, target: RolloutRef, change: Work[list[str]]) -> list[str]:
        """Write; return the changed ids, including those of an earlier try whose commit was not answered."""
        ids: dict[str, None] = {}
        caller = current_caller()

        def checked(connection: Connection) -> list[str]:
            check_own(connection, caller, target.batch_id)
            return change(connection)

        work = logged(checked, verb, str(target), lambda changed: f"{len(changed)} rollouts", done=bool)
        self.store.write(lambda connection: ids.update(dict.fromkeys(work(connection))))
        return list(ids)

    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        target = RolloutRef.of(id)
        chosen = None if rollout_ids is None else [str(_named(each, "rollout")) for each in rollout_ids]
        ids = self._changed(
            "rescore", target, lambda connection: cancel_and_rescore.rescore(connection, target, chosen)
        )
        if ids:
            self.signals.wake()
        return ids

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        self.rollout(rollout_id)
        return self.store.read(lambda connection: artefacts.listing(connection, rollout_id))

    def artefact(self, rollout_id: str, name: str) -> bytes:
        self.rollout(rollout_id)
        if "\0" in name:
            raise NotFound(f"rollout {rollout_id} has no artefact {name!r}")
        return self.store.read(lambda connection: artefacts.contents(connection, rollout_id, name))

    def drain_node(self, node: str) -> None:
        if not self.store.write(logged(partial(nodes.drain, node=node), "drain", node, done=bool)):
            raise NotFound(f"there is no node {node}: `farm doctor` lists the nodes")
        self.signals.wake()

    def add_engine(
        self, url: str, model: str = "", key: str = "none", tokenizer: str = "", tool_format: str = ""
    ) -> None:
        engine = StoredEngine(url, model, key, tokenizer=tokenizer, tool_format=tool_format)
        add = partial(llm_engines.add, engine=engine, secret_key=self.secret_key, caller=current_caller())
        self.store.write(logged(add, "engines add", url, model))
        self.signals.engines()

    def drain_engine(self, url: str) -> None:
        self._change_engine("drain", url, llm_engines.drain)

    def remove_engine(self, url: str) -> None:
        self._change_engine("remove", url, partial(llm_engines.remove, caller=current_caller()))

    def _change_engine(self, verb: str, url: str, change: Callable[..., bool]) -> None:
        if not self.store.write(logged(lambda connection: change(connection, url), f"engines {verb}", url, done=bool)):
            raise NotFound(f"there is no engine {url}: `farm engines list` lists the engines")
        self.signals.engines()

    def clear_engines(self, forget_weights: bool = False) -> int:
        clear = partial(llm_engines.clear, forget_weights=forget_weights)
        n = self.store.write(logged(clear, "engines clear", "all", lambda n: f"{n} engines"))
        self.signals.engines()
        return n

    def engines(self) -> Sequence[EngineState]:
        by_owner = self.store.read(llm_engines.uses)
        return [_state(engine, by_owner) for engine in self.store.read(llm_engines.listing)]

    def close(self) -> None:
        self.sandboxes.close()
        self.signals.close()
        self.store.close()


class _StoreWatch:
    """A watch of a batch that reads the store when notified of an ended rollout, and also polls."""

    def __init__(self, farm: LocalFarm, batch_id: str, listener: Listener) -> None:
        self._farm = farm
        self._batch_id = batch_id
        self._listener = listener

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        ask = partial(self._farm.page, self._batch_id, cursor, whole_groups)
        return self._awaited(ask, lambda page: page.settled, wait_s)

    def has_open(self, wait_s: float) -> bool:
        return self._awaited(lambda: self._farm.has_open(self._batch_id), lambda is_open: not is_open, wait_s)

    def _awaited(self, ask: Callable[[], T], settled: Callable[[T], bool], wait_s: float) -> T:
        deadline = time.monotonic() + wait_s
        while True:
            answer = ask()
            left_s = deadline - time.monotonic()
            if settled(answer) or left_s <= 0:
                return answer
            self._listener.wait(min(_POLL_S, left_s), lambda channel, ended: ended == self._batch_id)


def _named(text: str, kind: str) -> RolloutRef:
    """Return the parsed id. Raises NotFound if it is not of that kind."""
    target = RolloutRef.of(text)
    if target.kind != kind:
        raise NotFound(
            f"there is no {kind} {text}: the id has the form of a {target.kind}'s; a {kind}'s is {_FORMS[kind]}"
        )
    return target


def _state(engine: StoredEngine, by_owner: Mapping[str, Mapping[str, EngineUse]]) -> EngineState:
    uses_of_engine = [uses[engine.url] for uses in by_owner.values() if engine.url in uses]
    return EngineState(engine, sum(use.n_calls for use in uses_of_engine), sum(use.n_tokens for use in uses_of_engine))


class LocalAccess(AccessControl):
    """The verbs on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, new: NewKey) -> str:
        scopes = sorted_scopes(new.scopes)
        key = ApiKey(new.name, scopes, new.max_open, new.max_engines, new.max_rate, current_caller().name)
        text = f"rf-{secrets.token_urlsafe(32)}"
        add = partial(api_keys.add, key=key, digest=api_keys.digest_of(text.encode()))
        details = ", ".join(scope.value for scope in key.scopes)
        write = logged(add, "keys add", key.name, details)
        _written(self._store, write)
        return text

    def keys(self) -> Sequence[ApiKey]:
        return self._store.read(api_keys.listing)

    def revoke_key(self, name: str) -> None:
        revoke = partial(api_keys.revoke, name=name)
        work = logged(revoke, "keys revoke", name, done=bool)
        # an earlier try may have done it already: the answer to a commit can be lost
        was_there: list[bool] = []
        self._store.write(lambda connection: was_there.append(work(connection)))
        if not any(was_there):
            raise NotFound(f"there is no key {name!r}: `farm keys list` lists the existing ones")

    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        return self._store.read(lambda connection: audit_log.page(connection, limit, before))

    def prune_orders(self, days: float) -> int:
        days = checked(LogPruning, {"days": days}).days
        prune = partial(audit_log.prune, days=days)
        return self._store.write(logged(prune, "log prune", f"older than {days:g} days"))


class LocalAnnotations(AnnotationLog):
    """The verbs on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        new = checked(NewAnnotations, {"producer": producer, "step": step, "annotations": list(annotations)})
        write = partial(stored_annotations.write, new=new, caller=current_caller())
        return _written(self._store, write)

    def of(self, rollout_id: str) -> Sequence[Annotation]:
        RolloutRef.of(rollout_id)
        self._store.read(lambda connection: batches.rollout(connection, rollout_id))
        return self._store.read(lambda connection: stored_annotations.listing(connection, [rollout_id]))


class LocalRuns(Runs):
    """The verbs on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def keyed_batches(self, keys: Sequence[str]) -> Sequence[KeyedBatch]:
        return self._store.read(lambda connection: batches.keyed(connection, keys))

    def instances(self, group_ids: Sequence[str]) -> Sequence[Instance]:
        return self._store.read(lambda connection: consumers.instances_of(connection, group_ids))

    def record_step(self, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
        check_run(run)
        try:
            size_of(dict(record), _MAX_RECORD_BYTES)
        except ValueError as error:
            raise InvalidRequest(str(error), field="record") from None
        write = partial(consumers.record_step, run=run, step=step, record=record)
        return _written(self._store, write)

    def recorded_step(self, run: str, up_to: int | None = None) -> RecordedStep | None:
        check_run(run)
        return self._store.read(lambda connection: consumers.recorded_step(connection, run, up_to))

    def solve_rates(
        self,
        run: str,
        data_source: str,
        instance_ids: Sequence[str] | None = None,
        *,
        min_version: int | None = None,
        solved_at: float = 1.0,
    ) -> Sequence[SolveRate]:
        check_run(run)
        count = partial(
            summaries.solve_rates,
            run=run,
            data_source=data_source,
            instance_ids=instance_ids,
            min_version=min_version,
            solved_at=solved_at,
        )
        return self._store.read(count)


def _check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest("must be a SHA-256: 64 digits of 0-9 and a-f", field="digest")


class LocalOrders(WeightUpdateOrders):
    """Orders on a store and its signals. `workers_s` is how long an order waits for a first sign of a worker."""

    def __init__(self, store: Store, signals: Signals, workers_s: float) -> None:
        self._store = store
        self._signals = signals
        self._workers_s = workers_s

    @contextmanager
    def _acknowledgements(self) -> Iterator[Callable[[float], object]]:
        with closing(self._signals.listen(ACKNOWLEDGED)) as listener:
            yield listener.wait

    def chosen(self, urls: Collection[str] | None = None) -> list[StoredEngine]:
        known = {engine.url: engine for engine in self._store.read(llm_engines.listing)}
        if urls is None:
            return [engine for engine in known.values() if not is_reserved(engine.model)]
        wanted = [normal_url(url) for url in urls]
        if missing := [url for url in wanted if url not in known]:
            raise NotFound(f"there is no engine {missing[0]}: `farm engines list` lists the engines")
        return [known[url] for url in wanted]

    def newest_version(self) -> str:
        return self._store.read(llm_engines.newest_version)

    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None, held: bool = False) -> dict[str, int]:
        order = logged(
            lambda connection: llm_engines.set_paused(connection, paused, by, urls, held),
            *("engines pause" if paused else "engines resume", _engine_names(urls), f"{paused} by {by}".strip()),
        )
        return self._order(urls, order)

    def order_version(self, version: str, urls: Collection[str] | None, path: str = "") -> dict[str, int]:
        order = logged(
            lambda connection: llm_engines.set_version(connection, version, urls, path),
            *("engines version", _engine_names(urls), f"{version} {path}".strip()),
        )
        return self._order(urls, order)

    def hold(self, by: str, urls: Collection[str] | None) -> None:
        self._store.write(lambda connection: llm_engines.hold(connection, by, urls))

    def _order(self, urls: Collection[str] | None, order: Callable[..., None]) -> dict[str, int]:
        self.chosen(urls)
        self._store.write(order)
        self._signals.engines()
        return {engine.url: engine.n_orders for engine in self.chosen(urls)}

    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        known = {engine.url: engine for engine in self._store.read(llm_engines.listing)}
        by_owner = self._store.read(llm_engines.uses)
        wanted = {url: order for url, order in orders.items() if url in known}
        if not wanted:
            return []
        if not by_owner:
            if waited_s > self._workers_s:
                raise FarmUnreachable("no worker of this farm is alive to pass orders to the engines: start a node")
            return ["no worker is alive yet"]
        return [
            complaint
            for url, order in wanted.items()
            for complaint in (*_unnotified(known[url], order), *_unacknowledged(known[url], order, by_owner))
        ]


def _engine_names(urls: Collection[str] | None) -> str:
    return "all" if urls is None else ", ".join(urls)


def _unnotified(engine: StoredEngine, order: int) -> Iterator[str]:
    if engine.n_done < order:
        yield f"{engine.url} was not told" + (f" ({engine.failure})" if engine.failure else "")


def _unacknowledged(engine: StoredEngine, order: int, by_owner: Mapping[str, Mapping[str, EngineUse]]) -> Iterator[str]:
    for owner, uses in by_owner.items():
        use = uses.get(engine.url)
        if use is None or use.n_orders < order:
            yield f"worker {owner} does not know of it yet"
        elif use.n_calls and _must_be_idle(engine):
            yield f"worker {owner} has {use.n_calls} calls in flight on {engine.url}"


def _must_be_idle(engine: StoredEngine) -> bool:
    """Return whether the pause requires that calls end: engines that cannot freeze calls finish them."""
    freezes = engine.paused == "keep" and engine.info is not None and engine.info.control
    return bool(engine.paused) and not freezes
