"""What a trainer holds: the farm's verbs, reached by one address."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farm.errors import FarmUnreachable, InvalidRequest
from farm.request import BatchRequest
from farm.rollout import BatchStatus, Group, Reward, Rollout, Timing
from farm.service import Service
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import batches, migrations, trajectories
from farm.store.artefacts import KeptArtefact
from farm.store.engine import Store
from farm.trajectory import ModelCall

ADDRESS_FILE = "address.json"


def connect(url: str | Path | None = None, *, broker_url: str | None = None) -> Farm:
    """A farm, by its address: a database URL, the folder of an embedded farm, or nothing for what FARM_* say.

    `broker_url` only carries hints here: without it, or with the broker away, everything works by polling.
    Raises InvalidRequest for an address of no kind, FarmUnreachable for a folder without a farm, StoreUnavailable for
    a database that does not answer or is at another schema revision.
    """
    store_url, found_broker = address_of(url, settings())
    store = Store(store_url)
    try:
        migrations.check(store)
    except BaseException:
        store.close()
        raise
    return Farm(store, Signals(found_broker if broker_url is None else broker_url))


def address_of(url: str | Path | None, defaults: Settings) -> tuple[str, str]:
    """(store URL, broker URL) of a farm's address, as `connect` takes it."""
    if url is None:
        if defaults.store_url:
            return defaults.store_url, defaults.broker_url
        url = defaults.home
    text = str(url)
    if text.startswith(("http://", "https://")):
        raise InvalidRequest("this farm is reached by its database URL or its folder, not over HTTP", field="url")
    if "://" in text:
        return text, defaults.broker_url
    file = Path(text).expanduser() / ADDRESS_FILE
    try:
        address = json.loads(file.read_text())
    except FileNotFoundError:
        raise FarmUnreachable(
            f"no farm was ever started in {file.parent}: run `farm up`, or set FARM_STORE_URL"
        ) from None
    return address["store_url"], address["broker_url"]


class Farm:
    """A connection to a farm; `with` closes it. Safe to use from several threads."""

    def __init__(self, store: Store, signals: Signals) -> None:
        self._store = store
        self._signals = signals
        self._service = Service(store, signals)

    def submit(self, request: BatchRequest | Mapping[str, Any]) -> str:
        """Start a batch: its id. The same idempotency key gives the same batch, however often it is submitted.

        Raises InvalidRequest naming the field, UnknownHandler or Conflict; then nothing was started.
        """
        return self._service.submit(request)

    def status(self, batch_id: str) -> BatchStatus:
        """A batch in numbers, now. Raises NotFound."""
        return self._service.status(batch_id)

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until every rollout of a batch has ended. Raises NotFound, TimeoutError."""
        return self._service.wait(batch_id, timeout_s)

    def stream(self, batch_id: str, *, cursor: int = 0, timeout_s: float | None = None) -> Iterator[Rollout]:
        """Rollouts as they end, with their training rows, until all have. `rollout.cursor` resumes after that one."""
        return self._service.stream(batch_id, cursor, timeout_s)

    def stream_groups(self, batch_id: str, *, cursor: int = 0, timeout_s: float | None = None) -> Iterator[Group]:
        """Whole groups as the last of each ends, until all have. `group.cursor` resumes after that one."""
        return self._service.stream_groups(batch_id, cursor, timeout_s)

    def collect(self, batch_id: str, timeout_s: float | None = None) -> list[Rollout]:
        """All rollouts of a batch with their training rows as numpy arrays, by group and sample, once all have ended.

        `farm.adapters.arrays` makes padded arrays of them. Raises NotFound, TimeoutError.
        """
        return self._service.collect(batch_id, timeout_s)

    def cancel(self, batch_id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """End a batch, or these rollouts of it; the ids of those that had not ended. Harmless when repeated."""
        return self._service.cancel(batch_id, rollout_ids)

    def rescore(self, batch_id: str, rollout_ids: Collection[str] | None = None) -> list[str]:
        """Score again what was played to the end, without playing it again; the ids."""
        return self._service.rescore(batch_id, rollout_ids)

    def rollouts(self, batch_id: str) -> list[Rollout]:
        """All rollouts of a batch as they are now, without training rows. Raises NotFound."""
        return self._service.rollouts(batch_id)

    def rollout(self, rollout_id: str) -> Rollout:
        """One rollout as it is now, without training rows. Raises NotFound."""
        return self._store.read(lambda connection: batches.rollout(connection, rollout_id))

    def calls(self, rollout_id: str) -> Sequence[ModelCall]:
        """The model calls of a rollout's last attempt so far, also of one that died."""
        return self._store.read(lambda connection: trajectories.calls(connection, rollout_id))

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
        return self._store.read(lambda connection: batches.timings(connection, rollout_id))

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """The scores of a rollout, newest last."""
        return self._store.read(lambda connection: batches.rewards_of(connection, rollout_id))

    def recent(self, limit: int = 20) -> Sequence[str]:
        """The ids of the newest batches, newest first."""
        return self._store.read(lambda connection: batches.recent(connection, limit))

    def add_engine(self, url: str, model: str, key: str = "none") -> None:
        """Let the farm use an OpenAI-compatible server (`url` ends in /v1)."""
        self._service.add_engine(url, model, key)

    def remove_engine(self, url: str) -> None:
        """Let it use that server no more. Raises NotFound."""
        self._service.remove_engine(url)

    def close(self) -> None:
        self._signals.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
