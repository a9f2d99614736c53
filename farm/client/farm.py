"""The verbs of a farm: the one list of what a trainer may ask of it, whichever way it is reached.

`farm.client.local` implements them on a store, `farm.client.remote` over HTTP. What is made of other verbs is here.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farm.client.access.access_control import AccessControl
from farm.client.annotations.annotation_log import AnnotationLog
from farm.client.archive_uploads import TaskArchives
from farm.client.consumer_stream import CONSUMER, BatchWatch, Page, all_ended, pages
from farm.client.runs import Runs
from farm.client.sandboxes.borrower import Borrower
from farm.client.weight_server import WeightServer
from farm.client.weight_update import WeightUpdateOrders
from farm.errors import InvalidRequest
from farm.ids import RolloutRef
from farm.plugins import load
from farm.records.conservation import Conservation, Violation
from farm.records.engine import PauseMode
from farm.records.engine_state import EngineState, StoredEngine
from farm.records.node import Node
from farm.records.request import BatchRequest
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Group,
    KeptArtefact,
    Reward,
    Rollout,
    StageTimes,
    Timing,
    is_too_old,
)
from farm.records.trajectory import NO_VERSION, ModelCall, version_number

ADAPTERS = "farm.adapters"


class Farm(ABC):
    """A connection to a farm; `with` closes it. Safe to use from several threads.

    Verbs raise StoreUnavailable if the database does not answer, and over HTTP FarmUnreachable if the API does not.
    """

    orders: WeightUpdateOrders
    """The orders to engines of which pauses and weight updates are made."""
    runs: Runs
    """The store's memory of training runs, of which `farm.collecting` is made."""
    archives: TaskArchives
    """Task archives, of which `upload_archive` is made."""
    sandboxes: Borrower
    """Sandboxes that a client borrows: `farm.sandboxes.start()`."""
    access: AccessControl
    """Keys of the API, and the log of orders."""
    annotations: AnnotationLog
    """Figures of trainers about rollouts; `annotate` writes them."""

    @abstractmethod
    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Start a batch: its id. The same idempotency key gives the same batch, however often it is submitted.

        Raises InvalidRequest naming the field, UnknownHandler, Conflict, or Overloaded while as many rollouts as
        FARM_MAX_OPEN have not ended; then nothing was started.
        """

    def upload_archive(self, path: str | Path) -> str:
        """Upload a folder, or a tar, for `Instance.archive`: its digest, which depends on its files alone.

        Harmless when repeated. It is kept while a batch names it, and for a day after its last upload. Raises
        InvalidRequest for links out of it, devices, or more than 2 GB.
        """
        return self.archives.upload(path)

    @abstractmethod
    def status(self, batch_id: str) -> BatchStatus:
        """Return a batch in numbers, now. Raises NotFound."""

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until every rollout of a batch has ended. Raises NotFound, TimeoutError."""
        with self._watch(batch_id) as watch:
            status = self.status(batch_id)
            if not all_ended(watch, timeout_s):
                status = self.status(batch_id)
                ended = f"{status.n_finished} of {status.n_rollouts} ended in {timeout_s:g} s"
                raise TimeoutError(f"batch {batch_id}: {ended}")
            return status if status.done else self.status(batch_id)

    def watch(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Show a batch's progress in the terminal or notebook until it has ended, and return it; waits out an outage.

        Raises NotFound, TimeoutError.
        """
        from farm.client.batch_progress import watch

        return watch(self, batch_id, timeout_s=timeout_s)

    async def watch_async(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Do the same as `watch` in a thread beside an event loop; it ends when this is cancelled."""
        from farm.client.batch_progress import watch

        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(watch, self, batch_id, timeout_s=timeout_s, is_stopped=cancelled.is_set)
        finally:
            cancelled.set()

    def stream(
        self,
        batch_id: str,
        *,
        cursor: int | None = None,
        timeout_s: float | None = None,
        consumer: str = CONSUMER,
        max_staleness: int | None = None,
    ) -> Iterator[Rollout]:
        """Yield rollouts as they end, with their training rows, until all have.

        A consumer that comes back gets what it did not `acknowledge`, and what is scored again. `cursor` begins after a
        `rollout.cursor` instead. With `max_staleness`, what was sampled by weights more than so many versions older
        than the newest is left out, however late. Raises NotFound; TimeoutError when none ended for `timeout_s`.
        """
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=False):
            newest = self.newest_version() if max_staleness is not None else ""
            yield from (each for each in page.rollouts if not is_too_old(each.version_min, newest, max_staleness))

    def stream_groups(
        self,
        batch_id: str,
        *,
        cursor: int | None = None,
        timeout_s: float | None = None,
        consumer: str = CONSUMER,
        max_staleness: int | None = None,
    ) -> Iterator[Group]:
        """As `stream`, in whole groups as the last rollout of each ends; `acknowledge` each when it has been used.

        A group with a member that is too old is left out whole.
        """
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=True):
            newest = self.newest_version() if max_staleness is not None else ""
            for group_index in dict.fromkeys(rollout.group_index for rollout in page.rollouts):
                members = tuple(rollout for rollout in page.rollouts if rollout.group_index == group_index)
                if not any(is_too_old(each.version_min, newest, max_staleness) for each in members):
                    yield Group(members[0].group_id, members)

    def _pages(
        self, batch_id: str, cursor: int | None, timeout_s: float | None, consumer: str, whole_groups: bool
    ) -> Iterator[Page]:
        acknowledged = self.acknowledged(batch_id, consumer)
        start = acknowledged if cursor is None else cursor
        with self._watch(batch_id) as watch:
            yield from pages(watch, batch_id, start, whole_groups, timeout_s, lambda: self.status(batch_id).warnings)

    @abstractmethod
    def _watch(self, batch_id: str) -> AbstractContextManager[BatchWatch]:
        """Watch a batch for as long as the block lasts."""

    def acknowledge(self, given: Rollout | Group, consumer: str = CONSUMER) -> int:
        """Acknowledge this and all that the consumer's stream gave before it, so that they are not delivered again.

        Harmless when repeated. Returns the cursor that the consumer has come to. A consumer of groups acknowledges
        groups, as a rollout may be older than one of an unfinished group. Raises NotFound, InvalidRequest.
        """
        if not given.cursor:
            raise InvalidRequest("it has not ended, so no consumer has received it", field="rollout")
        return self.acknowledge_up_to(RolloutRef.of(given.group_id).batch_id, given.cursor, consumer)

    @abstractmethod
    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        """Acknowledge all that ended up to a cursor. Returns the cursor that the consumer has come to.

        Raises NotFound, and InvalidRequest for a cursor that was never given out.
        """

    @abstractmethod
    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """Return the cursor after which a consumer's streams go on; 0 if nothing is acknowledged. Raises NotFound."""

    @abstractmethod
    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """Return all rollouts of a batch with their training rows, by group and sample, once all have ended.

        `rows` makes a trainer's rows of them. Raises NotFound, TimeoutError.
        """

    def rows(
        self,
        batch_id: str,
        adapter: str = "arrays",
        *,
        timeout_s: float | None = None,
        max_staleness: int | None = None,
        **options: Any,
    ) -> Any:
        """Return a batch as the rows of a trainer, once all its rollouts have ended.

        The adapter of that name makes them, with its own `options`; `arrays` gives padded arrays (`farm.adapters`).
        `max_staleness` leaves out rows of weights so many versions older than the newest that the farm plays with: that
        of the batch itself holds while it is played, however late it is collected. Raises NotFound, TimeoutError.
        """
        make_rows = load(ADAPTERS, adapter)
        if not callable(make_rows):
            raise InvalidRequest(
                f"adapter {adapter} gives its trainer a result for each rollout, no rows", field="adapter"
            )
        rollouts = self.collect(batch_id, timeout_s)
        newest = version_number(self.newest_version()) if max_staleness is not None else NO_VERSION
        min_version = newest - max_staleness if max_staleness is not None and newest != NO_VERSION else None
        return make_rows(rollouts, min_version=min_version, **options)

    @abstractmethod
    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """End a batch, a group or a rollout, by its id, or these rollouts of it. Returns the ids that had not ended.

        They hold what was recorded so far, which never trains; what was being scored again keeps the score that it had.
        Harmless when repeated. Raises NotFound.
        """

    @abstractmethod
    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score again what was played to the end, without playing it again. Returns the ids. `id` as in `cancel`.

        The score that one has can only be followed by another: it stays if this is cancelled or fails.
        """

    def annotate(self, producer: str, step: int, annotations: Sequence[Mapping[str, Any]]) -> int:
        """Write figures of a trainer's step about completed rollouts; return how many were not there.

        Each is as `farm.NewAnnotation`. All are written or none. Raises Conflict for what is there with another value.
        """
        return self.annotations.write(producer, step, annotations)

    @abstractmethod
    def conservation(self, batch_id: str) -> Conservation:
        """Return the submitted, ended and in-flight counts of a batch and of each group. Raises NotFound."""

    @abstractmethod
    def violations(self, batch_id: str) -> Sequence[Violation]:
        """Return the violated invariants of a batch; see `farm doctor --batch`. Raises NotFound."""

    @abstractmethod
    def rollouts(self, batch_id: str) -> list[Rollout]:
        """Return all rollouts of a batch as they are now, without training rows. Raises NotFound."""

    @abstractmethod
    def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout as it is now, without training rows. Raises NotFound."""

    @abstractmethod
    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        """Return the model calls of a rollout's last attempt so far, also of one that was lost."""

    @abstractmethod
    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        """Return the artefacts of a rollout, of its last attempt that has any.

        Raises NotFound.
        """

    @abstractmethod
    def artefact(self, rollout_id: str, name: str) -> bytes:
        """Return the bytes of one of them. Raises NotFound."""

    @abstractmethod
    def timings(self, rollout_id: str) -> Sequence[Timing]:
        """Return every stage of every attempt of a rollout."""

    def newest_version(self) -> str:
        """Return the newest weights that were named to the engines, empty if none were.

        Without any engine, those that were named last: removing engines does not make what they sampled new again.
        """
        return self.orders.newest_version()

    @abstractmethod
    def stage_times(self, batch_id: str) -> Sequence[StageTimes]:
        """Return queue and work times of the stages of a batch: mean, median, p99, greatest. Raises NotFound."""

    @abstractmethod
    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """Return the scores of a rollout, newest last."""

    @abstractmethod
    def batches(self, limit: int = 20, before: str | None = None) -> Sequence[BatchSummary]:
        """Return the newest batches, newest first: state, size, mean reward, submitter, and when they were submitted.

        With `before`, those that were submitted before this batch. Raises NotFound.
        """

    @abstractmethod
    def recent(self, limit: int = 20) -> Sequence[str]:
        """Return the ids of the newest batches, newest first."""

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return all nodes: their room, the age of their last heartbeat, and the reason they get no rollouts."""

    @abstractmethod
    def drain_node(self, node: str) -> None:
        """Place no more rollouts on a node, which drains and exits within some seconds and its grace. Raises NotFound.

        It is what SIGTERM does to `farm node`: running stages go on for the grace, and the others are requeued.
        """

    @abstractmethod
    def add_engine(
        self, url: str, model: str = "", key: str = "none", tokenizer: str = "", tool_format: str = ""
    ) -> None:
        """Let the farm use an LLM server (`url` ends in /v1), or use it again; harmless when repeated.

        Without a model, the first that it lists; `tokenizer` is a folder or a name on a hub, where the engine does not
        say it itself. The server's capabilities are probed. Raises InvalidRequest for an address that is none.
        """

    @abstractmethod
    def drain_engine(self, url: str) -> None:
        """Send it no new rollouts; those that play there finish there. Raises NotFound."""

    @abstractmethod
    def remove_engine(self, url: str) -> None:
        """Stop using that server; rollouts that play there move to another. Raises NotFound."""

    @abstractmethod
    def clear_engines(self, forget_weights: bool = False) -> int:
        """Use none of the engines any more; how many there were. Calls wait until one is added.

        One that is added then gets no calls before it has the weights that were named last, as for an engine that is
        added beside others. With `forget_weights` it begins with its own.
        """

    @abstractmethod
    def engines(self) -> Sequence[EngineState]:
        """Return all engines, oldest first: what each can do, its orders, why it is out, what is in flight there.

        Over HTTP their keys are left out.
        """

    def pause_engines(
        self, mode: PauseMode = "drain", urls: Collection[str] | None = None, timeout_s: float = 600.0
    ) -> None:
        """Hold back new calls to all engines, or these, and return when they are paused.

        Calls that run end first (`drain`), freeze (`keep`) or are cut and go on after the resume (`abort`). Raises
        TimeoutError naming what still runs, and FarmUnreachable if no worker is alive. Engines stay paused until
        `resume_engines`, also when this process ends; see `weight_update`.
        """
        self.orders.pause(mode, urls, timeout_s)

    def set_version(
        self, version: str | int, urls: Collection[str] | None = None, timeout_s: float = 60.0, path: str | Path = ""
    ) -> Sequence[str]:
        """Name the weights that all engines, or these, have now. Raises TimeoutError.

        Returns those that could not be reached: they get no calls until the version is named to them. `path` as in
        `weight_update`.
        """
        return self.orders.set_version(str(version), urls, timeout_s, str(path))

    def resume_engines(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Let calls go on. Raises TimeoutError naming engines that do not."""
        self.orders.resume(urls, timeout_s)

    def weight_update(
        self,
        version: str | int,
        mode: PauseMode = "drain",
        urls: Collection[str] | None = None,
        timeout_s: float = 600.0,
        path: str | Path = "",
    ) -> AbstractContextManager[Sequence[StoredEngine]]:
        """Pause, let the block push new weights, name them, resume: `with farm.weight_update(7) as engines: push()`.

        If the pause fails, the engines are resumed; if the block fails, they stay paused, as their weights may be half
        written: push again, or `resume_engines`. `path` is where the servers themselves find these weights: the farm
        has an engine load them from there if it is added later or comes back without them; see `serve_weights`.
        """
        return self.orders.weight_update(str(version), mode, urls, timeout_s, str(path))

    def serve_weights(self, give: Callable[[StoredEngine, str], object]) -> WeightServer:
        """Give engines that lack the farm's weights what they lack, from now until the result is closed.

        `give(engine, version)` is called in a thread for each engine that was added later or came back with other
        weights; it pushes that version to it, and the farm lets it play. What it raises is logged; it is called again.
        """
        return WeightServer(self.orders, give)

    @abstractmethod
    def close(self) -> None:
        """Close the connection; nothing that was submitted ends by it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
