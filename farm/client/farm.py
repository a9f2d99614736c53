"""The verbs of a farm: the one list of operations for trainers, the same for every connection.

`farm.client.local` implements them on a store, `farm.client.remote` over HTTP. Verbs composed of others are here.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from farm.client.consumer_stream import CONSUMER, BatchWatch, Page, all_ended, check_consumer, pages
from farm.client.sandboxes.borrower import Borrower
from farm.client.verb_groups import PART_BYTES, AccessControl, AnnotationLog, ArchiveState, Runs
from farm.client.weight_update import WeightServer, WeightUpdateOrders
from farm.errors import InvalidRequest
from farm.ids import RolloutRef
from farm.plugins import load
from farm.records.engine import PauseMode
from farm.records.engine_state import EngineState, StoredEngine
from farm.records.node import Node
from farm.records.request import BatchRequest
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Conservation,
    Group,
    KeptArtefact,
    Reward,
    Rollout,
    StageTimes,
    Timing,
    Violation,
    is_too_old,
)
from farm.records.trajectory import NO_VERSION, ModelCall, version_number
from farm.task_archive import pack

ADAPTERS = "farm.adapters"


class Farm(ABC):
    """A connection to a farm, usable as a context manager. Safe to use from several threads.

    All verbs raise StoreUnavailable if the database does not answer, and over HTTP FarmUnreachable if the API does not.
    """

    orders: WeightUpdateOrders
    """Orders to engines, used by pauses and weight updates."""
    runs: Runs
    """Stored training runs, used by `farm.collecting`."""
    sandboxes: Borrower
    """Borrowed sandboxes: `farm.sandboxes.start()`."""
    access: AccessControl
    """API keys and the audit log."""
    annotations: AnnotationLog
    """Annotations of rollouts; `annotate` writes them."""

    @abstractmethod
    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Submit a batch and return its id. Submitting the same idempotency key again returns the same batch.

        Raises InvalidRequest naming the field, UnknownHandler, Conflict if the idempotency key has another request, or
        Overloaded while FARM_MAX_OPEN rollouts have not ended. After an error nothing was started.
        """

    def upload_archive(self, path: str | Path) -> str:
        """Upload a folder or a tar for `Instance.archive`; return its digest, which depends only on the files.

        Safe to repeat. The archive is kept while a batch names it, and for a day after its last upload. Raises
        InvalidRequest for links that lead out of it, devices, or more than 2 GB.
        """
        with tempfile.TemporaryFile() as archive:
            digest = pack(Path(path), archive)
            n_bytes = archive.seek(0, 2)
            n_parts = -(-n_bytes // PART_BYTES)
            state = self.archive_state(digest)
            if not state.whole:
                for number in sorted(set(range(n_parts)) - set(state.parts)):
                    archive.seek(number * PART_BYTES)
                    self.put_archive_part(digest, number, archive.read(PART_BYTES))
            self.complete_archive(digest, n_parts)
        return digest

    @abstractmethod
    def archive_state(self, digest: str) -> ArchiveState:
        """Return the state of an archive's upload."""

    @abstractmethod
    def put_archive_part(self, digest: str, number: int, data: bytes) -> None:
        """Store a part; safe to repeat."""

    @abstractmethod
    def complete_archive(self, digest: str, n_parts: int) -> None:
        """Check that the parts form a valid archive with this digest; from then on batches can name it.

        Raises InvalidRequest after dropping the parts.
        """

    @abstractmethod
    def status(self, batch_id: str) -> BatchStatus:
        """Return a batch's current counts, failures and mean reward. Raises NotFound."""

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until every rollout of a batch has ended. Raises NotFound; TimeoutError after `timeout_s` seconds."""
        with self._watch(batch_id) as watch:
            status = self.status(batch_id)
            if not all_ended(watch, timeout_s):
                status = self.status(batch_id)
                ended = f"{status.n_finished} of {status.n_rollouts} ended in {timeout_s:g} s"
                raise TimeoutError(f"batch {batch_id}: {ended}")
            return status if status.done else self.status(batch_id)

    def watch(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Show a batch's progress in the terminal or notebook until it has ended; return its status.

        Waits through outages of the farm. Raises NotFound; TimeoutError after `timeout_s` seconds.
        """
        from farm.client.batch_progress import watch

        return watch(self, batch_id, timeout_s=timeout_s)

    async def watch_async(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Run `watch` in a thread, for event loops; cancelling this ends it."""
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
        """Yield rollouts as they end, with their training rows, until all have ended.

        A consumer that reconnects gets the rollouts that it did not `acknowledge`, and rescored ones again. `cursor`
        starts after a `rollout.cursor` instead. `max_staleness` leaves out rollouts sampled by weights more than this
        many versions older than the newest, even if they became stale while they waited. Raises NotFound;
        TimeoutError when no rollout ended for `timeout_s` seconds.
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
        """Like `stream`, but yield whole groups when their last rollout ends; `acknowledge` each group after use.

        A group is left out if one of its members is too old.
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
        check_consumer(consumer)
        start = self.acknowledged(batch_id, consumer) if cursor is None else cursor
        with self._watch(batch_id) as watch:
            yield from pages(watch, batch_id, start, whole_groups, timeout_s, lambda: self.status(batch_id).warnings)

    @abstractmethod
    def _watch(self, batch_id: str) -> AbstractContextManager[BatchWatch]:
        """Watch a batch for the duration of the block."""

    def acknowledge(self, given: Rollout | Group, consumer: str = CONSUMER) -> int:
        """Acknowledge a rollout or group and everything that the stream gave before it; it is not delivered again.

        Safe to repeat. Returns the consumer's new cursor. A consumer of `stream_groups` must acknowledge groups: a
        rollout may be older than one of an unfinished group. Raises NotFound, InvalidRequest.
        """
        if not given.cursor:
            raise InvalidRequest("it has not ended, so no consumer has received it", field="rollout")
        return self.acknowledge_up_to(RolloutRef.of(given.group_id).batch_id, given.cursor, consumer)

    @abstractmethod
    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        """Acknowledge everything that ended up to a cursor. Returns the consumer's new cursor.

        Raises NotFound, and InvalidRequest for a cursor beyond the batch's last.
        """

    @abstractmethod
    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """Return the cursor after which a consumer's streams continue; 0 without acknowledgement. Raises NotFound."""

    @abstractmethod
    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """Wait until a batch has ended and return its rollouts with their training rows, by group and sample.

        `rows` converts them to a trainer's rows. Raises NotFound; TimeoutError after `timeout_s` seconds.
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
        """Wait until a batch has ended and return it as a trainer's rows.

        `adapter` names the adapter, which takes further `options`; `arrays` returns padded arrays (`farm.adapters`).
        `max_staleness` leaves out rows of weights more than this many versions older than the farm's newest at this
        call; the batch's own limit applied while it ran. Raises NotFound; TimeoutError after `timeout_s` seconds.
        """
        make_rows = load(ADAPTERS, adapter)
        if not callable(make_rows):
            raise InvalidRequest(
                f"adapter {adapter} returns a result for each rollout instead of rows", field="adapter"
            )
        rollouts = self.collect(batch_id, timeout_s)
        newest = version_number(self.newest_version()) if max_staleness is not None else NO_VERSION
        min_version = newest - max_staleness if max_staleness is not None and newest != NO_VERSION else None
        return make_rows(rollouts, min_version=min_version, **options)

    @abstractmethod
    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Cancel a batch, a group or a rollout by its id, or only `rollout_ids` of it. Returns the cancelled ids.

        Cancelled rollouts keep what was recorded so far, which is never trained on. A rollout that was being rescored
        keeps its score. Safe to repeat. Raises NotFound.
        """

    @abstractmethod
    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score completed rollouts again without running them again; `id` as in `cancel`. Returns the ids.

        A rollout keeps its present score until the new one exists, also if rescoring fails or is cancelled.
        """

    def annotate(self, producer: str, step: int, annotations: Sequence[Mapping[str, Any]]) -> int:
        """Write a trainer's annotations of completed rollouts for a step; return how many were new.

        Each is like `farm.NewAnnotation`. All or none are written. Raises Conflict if one exists with another value.
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
        """Return all rollouts of a batch in their current state, without training rows. Raises NotFound."""

    @abstractmethod
    def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout in its current state, without training rows. Raises NotFound."""

    @abstractmethod
    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        """Return the model calls of a rollout's last attempt so far, even if the attempt was lost."""

    @abstractmethod
    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        """Return the artefacts of the rollout's last attempt that has any, without their bytes. Raises NotFound."""

    @abstractmethod
    def artefact(self, rollout_id: str, name: str) -> bytes:
        """Return the bytes of an artefact. Raises NotFound."""

    @abstractmethod
    def timings(self, rollout_id: str) -> Sequence[Timing]:
        """Return the timing of every stage of every attempt of a rollout."""

    def newest_version(self) -> str:
        """Return the newest weight version named to the engines, empty if none was.

        Without engines it is the version named last: removing engines does not make older samples current again.
        """
        return self.orders.newest_version()

    @abstractmethod
    def stage_times(self, batch_id: str) -> Sequence[StageTimes]:
        """Return queue and work times of a batch's stages: mean, median, p99, maximum, in s. Raises NotFound."""

    @abstractmethod
    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """Return the scores of a rollout, newest last."""

    @abstractmethod
    def batches(self, limit: int = 20, before: str | None = None) -> Sequence[BatchSummary]:
        """Return the newest batches, newest first: state, size, mean reward, submitter, and time of submission.

        With `before`, those submitted before that batch. Raises NotFound.
        """

    @abstractmethod
    def recent(self, limit: int = 20) -> Sequence[str]:
        """Return the ids of the newest batches, newest first."""

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return all nodes: their room, the age of their last heartbeat, and why they get no rollouts."""

    @abstractmethod
    def drain_node(self, node: str) -> None:
        """Drain a node: it gets no more rollouts and exits after at most its grace period. Raises NotFound.

        Same as SIGTERM to `farm node`: running stages may continue for the grace, and the others are requeued.
        """

    @abstractmethod
    def add_engine(
        self, url: str, model: str = "", key: str = "none", tokenizer: str = "", tool_format: str = ""
    ) -> None:
        """Add an LLM server (`url` ends in /v1), or use a drained or removed one again; safe to repeat.

        Without a model, the first that it lists. `tokenizer` is a folder or a name on a hub, needed if the engine does
        not report it. The server's capabilities are probed later. Raises InvalidRequest for an invalid address.
        """

    @abstractmethod
    def drain_engine(self, url: str) -> None:
        """Send no new rollouts to an engine; running ones finish there. Raises NotFound."""

    @abstractmethod
    def remove_engine(self, url: str) -> None:
        """Stop using an engine; its running rollouts move to others. Raises NotFound."""

    @abstractmethod
    def clear_engines(self, forget_weights: bool = False) -> int:
        """Remove all engines; return how many there were. Calls wait until one is added.

        Engines added later get no calls until they have the weights that were named last. With `forget_weights` they
        start with their own.
        """

    @abstractmethod
    def engines(self) -> Sequence[EngineState]:
        """Return all engines, oldest first: capabilities, orders, why they are out, and calls in flight.

        Over HTTP their keys are left out.
        """

    def pause_engines(
        self, mode: PauseMode = "drain", urls: Collection[str] | None = None, timeout_s: float = 600.0
    ) -> None:
        """Pause all engines, or these: hold back new calls, and return when running calls have stopped.

        Running calls end first (`drain`), freeze (`keep`), or are cut and continue after the resume (`abort`). Engines
        stay paused until `resume_engines`, even if this process ends; see `weight_update`. Raises TimeoutError naming
        the calls that still run after `timeout_s` seconds, and FarmUnreachable if no worker is alive.
        """
        self.orders.pause(mode, urls, timeout_s)

    def set_version(
        self, version: str | int, urls: Collection[str] | None = None, timeout_s: float = 60.0, path: str | Path = ""
    ) -> Sequence[str]:
        """Set the weight version of all engines, or these; `path` as in `weight_update`. Raises TimeoutError.

        Returns the engines that could not be reached: they get no calls until they confirm the version.
        """
        return self.orders.set_version(str(version), urls, timeout_s, str(path))

    def resume_engines(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Resume engines after a pause. Raises TimeoutError naming those that do not."""
        self.orders.resume(urls, timeout_s)

    def weight_update(
        self,
        version: str | int,
        mode: PauseMode = "drain",
        urls: Collection[str] | None = None,
        timeout_s: float = 600.0,
        path: str | Path = "",
    ) -> AbstractContextManager[Sequence[StoredEngine]]:
        """Pause, run the block to push weights, set the version, resume: `with farm.weight_update(7) as es: push(es)`.

        If the pause fails, the engines resume. If the block fails, they stay paused, as their weights may be half
        written: push again, or call `resume_engines`. `path` is where the servers can load these weights from: the
        farm orders that of engines that are added later or restart without them; see `serve_weights`.
        """
        return self.orders.weight_update(str(version), mode, urls, timeout_s, str(path))

    def serve_weights(self, give: Callable[[StoredEngine, str], object]) -> WeightServer:
        """Push the farm's weights to engines that lack them, in a thread, until the returned server is closed.

        The thread calls `give(engine, version)` for each engine that was added later or restarted with other weights.
        It must push that version; then the engine gets calls. Its exceptions are logged, and it is called again.
        """
        return WeightServer(self.orders, give)

    @abstractmethod
    def close(self) -> None:
        """Close the connection; submitted batches continue."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
