"""Training runs, on a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from farm.client.runs import Runs
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate, check_run
from farm.records.values import size_of
from farm.store import batches, consumers
from farm.store.database import Store
from farm.store.reports import solve_rates

_MAX_RECORD_BYTES = 16_000_000


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
        try:
            return self._store.write(write)
        except IntegrityError:  # another process wrote it at the same moment; now it can be read
            return self._store.write(write)

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
            solve_rates.solve_rates,
            run=run,
            data_source=data_source,
            instance_ids=instance_ids,
            min_version=min_version,
            solved_at=solved_at,
        )
        return self._store.read(count)
