"""One worker process: its store, its event loop, its claims and the engines it may use. Celery tasks borrow it."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import PurePosixPath
from typing import Any

from farm.request import Limits, SamplingParams
from farm.rollout import Stage
from farm.settings import Settings, settings
from farm.signals import Signals
from farm.store import artefacts, batches, engines, migrations, rollouts, trajectories
from farm.store.engine import Store
from farm.store.rollouts import Claim
from farm.trajectory import ModelCall
from workers.interfaces import Artefact, Keep, Policy, Record
from workers.leases import Leases
from workers.loop import Loop
from workers.policy.engines import EngineAddress
from workers.policy.pool import EnginePool
from workers.stages import Job

_ENGINES_EVERY_S = 2.0
_REMEMBER = 256
_NAME_CHARS = 80


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
        job = self.job_of(claim.batch_id, claim.group_index, claim.rollout_id, claim.attempt, claim.sample_index)
        return job, self._request(claim.batch_id)[1]

    def job_of(self, batch_id: str, group_index: int, rollout_id: str, attempt: int, sample_index: int) -> Job:
        """What to play for a sample of an instance."""
        request, _ = self._request(batch_id)
        data_source, fields = self._instance(batch_id, group_index)
        return Job(
            rollout_id=rollout_id,
            attempt=attempt,
            sample_index=sample_index,
            data_source=data_source,
            fields=fields,
            sampling=request["sampling"],
            limits=request["limits"],
            sandbox_kind=request["sandbox"] if request["sandbox"] != "auto" else self.options.sandbox,
            model=request["model"],
            n_samples=request["n_samples"],
        )

    def recorder(self, claim: Claim) -> Recorder:
        return Recorder(self.store, claim, self.options.artefacts_mb)

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
    """Writes what happens in one attempt: its artefacts, and its model calls, which it keeps for the segments."""

    def __init__(self, store: Store, claim: Claim, artefacts_mb: float) -> None:
        self._store = store
        self._claim = claim
        self._log = trajectories.CallLog(claim.rollout_id, claim.attempt)
        self._room = int(artefacts_mb * 1_000_000)
        self._names: set[str] = set()
        self.calls: dict[int, ModelCall] = {}

    @property
    def record(self) -> Record:
        return self._record

    @property
    def keep(self) -> Keep:
        return self._keep

    async def _record(self, call: ModelCall) -> None:
        self.calls[call.index] = call
        row = self._log.row(call)
        await asyncio.wrap_future(self._store.submit(lambda connection: trajectories.record_call(connection, row)))

    async def _keep(self, index: int, artefact: Artefact) -> str:
        data = await asyncio.to_thread(artefacts.packed, artefact.data)
        if len(data) > self._room:
            return ""
        self._room -= len(data)
        name = self._new_name(index, artefact.name)
        work = partial(
            artefacts.keep,
            held=self._claim,
            name=name,
            media_type=artefact.media_type,
            n_bytes=len(artefact.data),
            data=data,
        )
        return name if await asyncio.wrap_future(self._store.submit(work)) else ""

    def _new_name(self, index: int, asked: str) -> str:
        """The turn, then the name as it was asked for, with a number if that is taken: fit to be a file's name."""
        path = PurePosixPath(re.sub(r"[^A-Za-z0-9._-]+", "-", asked)[-_NAME_CHARS:])
        tries = ("" if number == 1 else f"-{number}" for number in count(1))
        name = next(name for more in tries if (name := f"{index}-{path.stem}{more}{path.suffix}") not in self._names)
        self._names.add(name)
        return name


def owner_name(node: str, pool: str, pid: int) -> str:
    """Names a worker process in the leases it holds."""
    return f"{node}/{pool}/{pid}"


@lru_cache(maxsize=1)
def worker() -> Worker:
    """This process's worker, made at its first task."""
    # a shell or a kernel takes half a dozen descriptors, and a worker has hundreds of them
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    options = settings()
    return Worker(options.pool, options)
