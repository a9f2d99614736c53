"""One worker process: its store, its event loop, its claims and the engines it may use. Celery tasks borrow it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from farm.request import Limits, SamplingParams
from farm.rollout import Stage
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import batches, engines, migrations, rollouts, trajectories
from farm.store.engine import Store
from farm.store.rollouts import Claim
from farm.trajectory import ModelCall
from workers.interfaces import Policy, Record
from workers.leases import Leases
from workers.loop import Loop
from workers.policy.engines import EngineAddress
from workers.policy.pool import EnginePool
from workers.stages import Job

_ENGINES_EVERY_S = 2.0
_REMEMBER = 256


class Worker:
    """What all tasks of this process share."""

    def __init__(self, pool: str, options: Settings) -> None:
        self.node = options.node
        self.options = options
        self.owner = owner_name(options.node, pool, os.getpid())
        self.store = Store(options.database_url)
        migrations.check(self.store)
        self.signals = Signals(options.broker_url)
        self.loop = Loop()
        self.leases = Leases(self.store, self.signals, self.owner, options.lease_s)
        self.engines = EnginePool(lambda: self._addresses, timeout_s=options.policy_timeout_s)
        self._addresses: Sequence[EngineAddress] = ()
        self._addresses_due = 0.0
        self._request = lru_cache(_REMEMBER)(self._read_request)
        self._instance = lru_cache(_REMEMBER)(self._read_instance)

    def claim(self, rollout_id: str, attempt: int, stage: Stage) -> Claim | None:
        """Take a stage; None if it is not ours to take, or this worker is about to end."""
        if self.leases.draining:
            return None
        node, owner, lease_s = self.node, self.owner, self.options.lease_s
        return self.store.write(
            lambda connection: rollouts.claim(connection, rollout_id, attempt, stage, node, owner, lease_s)
        )

    def job(self, claim: Claim) -> tuple[Job, int]:
        """What to play for a claim, and the batch's max_attempts."""
        request, max_attempts = self._request(claim.batch_id)
        data_source, fields = self._instance(claim.batch_id, claim.group_index)
        job = Job(
            rollout_id=claim.rollout_id,
            attempt=claim.attempt,
            sample_index=claim.sample_index,
            data_source=data_source,
            fields=fields,
            sampling=request["sampling"],
            limits=request["limits"],
            sandbox_kind=request["sandbox"] if request["sandbox"] != "auto" else self.options.sandbox,
            model=request["model"],
        )
        return job, max_attempts

    def recorder(self, claim: Claim) -> Recorder:
        return Recorder(self.store, claim)

    def _read_request(self, batch_id: str) -> tuple[dict[str, Any], int]:
        raw, max_attempts = self.store.read(lambda connection: batches.request_of(connection, batch_id))
        parsed = {
            "sampling": SamplingParams.model_validate(raw["sampling"]),
            "limits": Limits.model_validate(raw["limits"]),
        }
        return raw | parsed, max_attempts

    def _read_instance(self, batch_id: str, group_index: int) -> tuple[str, dict[str, Any]]:
        return self.store.read(lambda connection: batches.instance_fields(connection, batch_id, group_index))

    def policy(self, job: Job) -> Policy:
        """The policy of one rollout, on the engines that the store lists now; read here, never on the event loop."""
        if time.monotonic() >= self._addresses_due:
            self._addresses_due = time.monotonic() + _ENGINES_EVERY_S
            found = self.store.read(engines.listing)
            self._addresses = [EngineAddress(engine.url, engine.model, engine.key) for engine in found]
        return self.engines.policy(job.rollout_id, job.model)

    def close(self) -> None:
        self.leases.close()
        self.store.close()
        self.signals.close()


class Recorder:
    """Writes the model calls of one attempt as they happen; keeps them for the segments at the end."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._log = trajectories.CallLog(claim.rollout_id, claim.attempt)
        self.calls: dict[int, ModelCall] = {}

    @property
    def record(self) -> Record:
        return self._record

    async def _record(self, call: ModelCall) -> None:
        self.calls[call.index] = call
        row = self._log.row(call)
        await asyncio.wrap_future(self._store.submit(lambda connection: trajectories.record_call(connection, row)))


def owner_name(node: str, pool: str, pid: int) -> str:
    """Names a worker process in the leases it holds."""
    return f"{node}/{pool}/{pid}"


@lru_cache(maxsize=1)
def worker() -> Worker:
    """This process's worker, made at its first task."""
    options = settings()
    return Worker(options.pool, options)
