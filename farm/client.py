"""What a trainer holds: the farm's verbs, reached by one address."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from farm.deliveries import CONSUMER
from farm.engine import PauseMode
from farm.engines import EngineState
from farm.errors import FarmUnreachable, InvalidRequest
from farm.request import BatchRequest
from farm.rollout import BatchStatus, Group, Reward, Rollout, Timing
from farm.service import Service
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import migrations
from farm.store.artefacts import KeptArtefact
from farm.store.audit import Conservation, Violation
from farm.store.engine import PATIENCE_S, Store
from farm.store.engines import Engine
from farm.store.nodes import Node
from farm.trajectory import ModelCall

if TYPE_CHECKING:
    from farm.remote import Remote

ADDRESS_FILE = "address.json"


def connect(url: str | Path | None = None, *, broker_url: str | None = None) -> Farm:
    """A farm, by its address: a database URL, the folder of an embedded farm, the `http://HOST:PORT` of its API, or
    nothing for what FARM_* say.

    `broker_url` only carries hints here: without it, or with the broker away, everything works by polling. An API is
    shown FARM_API_KEY; while it is away it is waited for as a database is, and streams go on where they were.

    Raises InvalidRequest for an address of no kind, FarmUnreachable for a folder without a farm or an API that does not
    answer, NotAllowed for one that wants another key, StoreUnavailable for a database that does not answer or is at
    another schema revision.
    """
    if is_http(url):
        return Farm(_over_http(str(url)))
    store, found_broker = open_store(url)
    return Farm(Service(store, Signals(found_broker if broker_url is None else broker_url), settings().max_open))


def is_http(url: str | Path | None) -> bool:
    """Whether an address is one of an API."""
    return str(url).startswith(("http://", "https://"))


def _over_http(url: str) -> Remote:
    # few need it, and it takes long to load
    from farm.remote import Remote

    remote = Remote(url, settings().api_key)
    try:
        remote.check()
    except BaseException:
        remote.close()
        raise
    return remote


def open_store(url: str | Path | None = None, patience_s: float = PATIENCE_S) -> tuple[Store, str]:
    """The store of a farm, by its address, and its broker's URL. Raises as `connect` does."""
    store_url, broker_url = address_of(url, settings())
    store = Store(store_url, patience_s)
    try:
        migrations.check(store)
    except BaseException:
        store.close()
        raise
    return store, broker_url


def address_of(url: str | Path | None, defaults: Settings) -> tuple[str, str]:
    """(store URL, broker URL) of a farm's address, as `connect` takes it, but for that of an API."""
    if url is None:
        if defaults.store_url:
            return defaults.store_url, defaults.broker_url
        url = defaults.home
    text = str(url)
    if is_http(text):
        raise InvalidRequest(
            "this needs the farm's database URL or its folder, not the address of its API", field="url"
        )
    if "://" in text:
        return text, defaults.broker_url
    file = Path(text).expanduser() / ADDRESS_FILE
    try:
        address = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FarmUnreachable(
            f"no farm was ever started in {file.parent}: run `farm up`, or set FARM_STORE_URL"
        ) from None
    return address["store_url"], address["broker_url"]


class Farm:
    """A connection to a farm; `with` closes it. Safe to use from several threads."""

    def __init__(self, service: Service | Remote) -> None:
        self._service = service

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Start a batch: its id. The same idempotency key gives the same batch, however often it is submitted.

        Raises InvalidRequest naming the field, UnknownHandler, Conflict, or Overloaded while as many rollouts as
        FARM_MAX_OPEN have not ended; then nothing was started.
        """
        return self._service.submit(request)

    def status(self, batch_id: str) -> BatchStatus:
        """A batch in numbers, now. Raises NotFound."""
        return self._service.status(batch_id)

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until every rollout of a batch has ended. Raises NotFound, TimeoutError."""
        return self._service.wait(batch_id, timeout_s)

    def stream(
        self,
        batch_id: str,
        *,
        cursor: int | None = None,
        timeout_s: float | None = None,
        consumer: str = CONSUMER,
    ) -> Iterator[Rollout]:
        """Rollouts as they end, with their training rows, until all have.

        A consumer that comes back is given what it did not `acknowledge`, also what it had already been given; one that
        is scored again comes again. `cursor` begins after a `rollout.cursor` instead; 0 is the beginning. Raises
        NotFound; TimeoutError when none ended for `timeout_s`.
        """
        return self._service.stream(batch_id, cursor, timeout_s, consumer)

    def stream_groups(
        self,
        batch_id: str,
        *,
        cursor: int | None = None,
        timeout_s: float | None = None,
        consumer: str = CONSUMER,
    ) -> Iterator[Group]:
        """As `stream`, in whole groups as the last rollout of each ends; `acknowledge` each when it has been used."""
        return self._service.stream_groups(batch_id, cursor, timeout_s, consumer)

    def acknowledge(self, given: Rollout | Group, consumer: str = CONSUMER) -> int:
        """Say that this, and all that the consumer's stream gave before it, was dealt with and need not come again.

        Harmless when repeated; it never moves back. Returns the cursor that the consumer has come to. Whoever takes
        groups acknowledges groups, as a rollout may be older than one of an unfinished group. Raises NotFound,
        InvalidRequest for what has not ended.
        """
        return self._service.acknowledge(given, consumer)

    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """The cursor after which a consumer's streams go on; 0 if it has acknowledged nothing. Raises NotFound."""
        return self._service.acknowledged(batch_id, consumer)

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """All rollouts of a batch with their training rows as numpy arrays, by group and sample, once all have ended.

        `farm.adapters.arrays` makes padded arrays of them. Raises NotFound, TimeoutError.
        """
        return self._service.collect(batch_id, timeout_s)

    def cancel(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """End a batch, a group or a rollout, by its id, or these rollouts of it; the ids of those that had not ended.

        They hold what was recorded so far, which never trains. Harmless when repeated. Raises NotFound.
        """
        return self._service.cancel(id, rollout_ids)

    def rescore(self, id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score again what was played to the end, without playing it again; the ids. `id` as in `cancel`."""
        return self._service.rescore(id, rollout_ids)

    def conservation(self, batch_id: str) -> Conservation:
        """What was submitted against what ended and what is in flight, of a batch and each group. Raises NotFound."""
        return self._service.conservation(batch_id)

    def violations(self, batch_id: str) -> Sequence[Violation]:
        """What must never be true of a batch, and is; see `farm doctor --batch`. Raises NotFound."""
        return self._service.violations(batch_id)

    def rollouts(self, batch_id: str) -> list[Rollout]:
        """All rollouts of a batch as they are now, without training rows. Raises NotFound."""
        return self._service.rollouts(batch_id)

    def rollout(self, rollout_id: str) -> Rollout:
        """One rollout as it is now, without training rows. Raises NotFound."""
        return self._service.rollout(rollout_id)

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        """The model calls of a rollout's last attempt so far, also of one that died."""
        return self._service.calls(rollout_id)

    def artefacts(self, rollout_id: str) -> Sequence[KeptArtefact]:
        """What a rollout's tool calls made and the model was not shown, of its last attempt that has any.

        Raises NotFound.
        """
        return self._service.artefacts(rollout_id)

    def artefact(self, rollout_id: str, name: str) -> bytes:
        """The bytes of one of them. Raises NotFound."""
        return self._service.artefact(rollout_id, name)

    def timings(self, rollout_id: str) -> Sequence[Timing]:
        """Every stage of every attempt of a rollout."""
        return self._service.timings(rollout_id)

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """The scores of a rollout, newest last."""
        return self._service.rewards(rollout_id)

    def recent(self, limit: int = 20) -> Sequence[str]:
        """The ids of the newest batches, newest first."""
        return self._service.recent(limit)

    def nodes(self) -> Sequence[Node]:
        """All nodes: their room, the age of their last heartbeat, and why they are given nothing, if so."""
        return self._service.nodes()

    def add_engine(
        self, url: str, model: str = "", key: str = "none", tokenizer: str = "", tool_format: str = ""
    ) -> None:
        """Let the farm use an LLM server (`url` ends in /v1), or use it again; harmless when repeated.

        Without a model, the first that it lists; `tokenizer` is a folder or a name on a hub, where the engine does not
        say it itself. What the server can do is found out. Raises InvalidRequest for an address that is none.
        """
        self._service.engines.add(Engine(url, model, key, tokenizer=tokenizer, tool_format=tool_format))

    def drain_engine(self, url: str) -> None:
        """Send it no new rollouts; those that play there finish there. Raises NotFound."""
        self._service.engines.drain(url)

    def remove_engine(self, url: str) -> None:
        """Let it use that server no more; what plays there moves on. Raises NotFound."""
        self._service.engines.remove(url)

    def clear_engines(self) -> int:
        """Use none of the engines any more; how many there were. Calls wait until one is added."""
        return self._service.engines.clear()

    def engines(self) -> Sequence[EngineState]:
        """All engines, oldest first: what each can do, its orders, why it is out, what is in flight there.

        Over HTTP their keys are left out.
        """
        return self._service.engines.states()

    def pause_engines(
        self, mode: PauseMode = "drain", urls: Collection[str] | None = None, timeout_s: float = 600.0
    ) -> None:
        """Hold back new calls to all engines, or these, and return when they are paused.

        Calls that run end first (`drain`), freeze (`keep`) or are cut and go on after the resume (`abort`). Raises
        TimeoutError naming what still runs, and FarmUnreachable if no worker is alive. Engines stay paused until
        `resume_engines`, also when this process ends; see `weight_update`.
        """
        self._service.engines.pause(mode, urls, timeout_s)

    def set_version(
        self, version: str | int, urls: Collection[str] | None = None, timeout_s: float = 60.0
    ) -> Sequence[str]:
        """Name the weights that all engines, or these, have now. Raises TimeoutError.

        Returns those that could not be reached: they get no calls until they are told again.
        """
        return self._service.engines.set_version(str(version), urls, timeout_s)

    def resume_engines(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Let calls go on. Raises TimeoutError naming engines that do not."""
        self._service.engines.resume(urls, timeout_s)

    def weight_update(
        self,
        version: str | int,
        mode: PauseMode = "drain",
        urls: Collection[str] | None = None,
        timeout_s: float = 600.0,
    ) -> AbstractContextManager[Sequence[Engine]]:
        """Pause, let the block push new weights, name them, resume: `with farm.weight_update(7) as engines: push()`.

        If the pause fails, the engines are resumed; if the block fails, they stay paused, as their weights may be half
        written: push again, or `resume_engines`.
        """
        return self._service.engines.weight_update(str(version), mode, urls, timeout_s)

    def close(self) -> None:
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
