"""One worker process: its store, its event loop, its claims and the engines it may use. Celery tasks borrow it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import resource
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import count
from pathlib import PurePosixPath
from typing import Any, TypeVar

from farm.request import Limits, SamplingParams
from farm.rollout import Stage, group_id
from farm.settings import Settings, settings
from farm.signals import Signals, redis_client
from farm.store import artefacts, batches, migrations, nodes, rollouts, trajectories
from farm.store.engine import Store
from farm.store.rollouts import Claim
from farm.trajectory import ModelCall
from workers.breaker import Breaker
from workers.fleet import Fleet
from workers.interfaces import Artefact, Keep, Policy, Record
from workers.leases import Leases
from workers.loop import Loop
from workers.policy.engines import open_engine
from workers.policy.load import SharedLoads
from workers.policy.pool import EnginePool, Wish
from workers.policy.rollout import RolloutPolicy, Rules
from workers.stages import Job
from workers.watchdog import Watchdog

_REMEMBER = 256
_NAME_CHARS = 80
_STORE_S = 5.0
"""Who plays waits so long for a store that does not answer."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Worker:
    """What all tasks of this process share."""

    def __init__(self, pool: str, options: Settings) -> None:
        self.node = options.node
        self.options = options
        self.owner = owner_name(options.node, pool, os.getpid())
        # what was played is kept and written later, however long the database is away
        self.store = Store(options.database_url, patience_s=math.inf)
        migrations.check(self.store)
        self.signals = Signals(options.broker_url)
        self.loop = Loop()
        self.breaker = Breaker(pool, self.store.read(lambda connection: nodes.doubted(connection, options.node)))
        self.leases = Leases(self.store, self.signals, self.owner, options.lease_s, options.stall_s)
        self.watchdog = Watchdog(self.loop, self.leases, options.stall_s)
        self.watchdog.start()
        self.fleet = Fleet(self.store, self.signals, self.owner)
        redis = redis_client(options.broker_url)
        self.loads = SharedLoads(redis, self.owner) if redis is not None else None
        self.engines = EnginePool(
            self.fleet,
            ledger=self.fleet,
            others=self.loads,
            open_engine=partial(open_engine, timeout_s=options.policy_timeout_s),
        )
        self.fleet.on_change = self.engines.changed
        if pool == Stage.RUN:
            self._watch_engines()
        self._request = lru_cache(_REMEMBER)(self._read_request)
        self._instance = lru_cache(_REMEMBER)(self._read_instance)

    def _watch_engines(self) -> None:
        """Also while nothing is played: new engines are asked what they can do, and given their orders."""
        self.fleet.start()
        if self.loads is not None:
            self.loads.start(self.engines.tally)
        self.loop.run(self.engines.start())

    def claim(self, rollout_id: str, attempt: int, stage: Stage) -> Claim | None:
        """Take a stage; None if it is not ours to take, or this worker is about to end."""
        if self.leases.draining:
            return None
        node, owner, lease_s = self.node, self.owner, self.options.lease_s
        tries: list[float] = []
        return self.store.write(
            lambda connection: rollouts.claim(connection, rollout_id, attempt, stage, node, owner, lease_s, tries)
        )

    def job(self, claim: Claim) -> Job:
        """What to play for a claim."""
        return self.job_of(claim.batch_id, claim.group_index, claim.rollout_id, claim.attempt, claim.sample_index)

    def job_of(self, batch_id: str, group_index: int, rollout_id: str, attempt: int, sample_index: int) -> Job:
        """What to play for a sample of an instance."""
        request = self._request(batch_id)
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
            agent=request["agent"],
            group_id=group_id(batch_id, group_index),
            rules=request["rules"],
        )

    def recorder(self, claim: Claim) -> Recorder:
        return Recorder(self.store, claim, self.options.artefacts_mb)

    def _read_request(self, batch_id: str) -> dict[str, Any]:
        raw = self.store.read(lambda connection: batches.request_of(connection, batch_id))
        parsed = {
            "sampling": SamplingParams.model_validate(raw["sampling"]),
            "limits": Limits.model_validate(raw["limits"]),
            # batches of an older farm do not say
            "agent": raw.get("agent", ""),
            "rules": _rules(raw),
        }
        return raw | parsed

    def _read_instance(self, batch_id: str, group_index: int) -> tuple[str, dict[str, Any]]:
        return self.store.read(lambda connection: batches.instance_fields(connection, batch_id, group_index))

    def policy(self, job: Job) -> Policy:
        """The policy of one rollout, on whichever engines the farm has when it calls."""
        seat = self.engines.seat(Wish(job.rollout_id, job.group_id, job.model))
        return RolloutPolicy(seat, job.rollout_id, job.model, job.rules)

    def close(self) -> None:
        self.watchdog.close()
        self.leases.close()
        self.loop.run(self.engines.aclose())
        if self.loads is not None:
            self.loads.close()
        self.fleet.close()
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
        self._late: Future[Any] | None = None
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
        # what has been sampled is written even if the rollout is cut off here, at its deadline say
        await self._written(self._store.submit(lambda connection: trajectories.record_call(connection, row)))

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
        return "" if await self._written(self._store.submit(work)) is False else name

    async def _written(self, writing: Future[T]) -> T | None:
        """What a write says, or None if the store is away: time goes on for who plays, who is not to pay for that.

        The next writes are not waited for then, until this one is made: they are all made in order, later.
        """
        late = self._late is not None and not self._late.done()
        if not late:
            await asyncio.wait([asyncio.wrap_future(writing)], timeout=_STORE_S)
        if writing.done():
            return writing.result()
        self._late = writing
        writing.add_done_callback(self._written_late)
        return None

    def _written_late(self, done: Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("%s: what it did could not be written down later: %s", self._claim.rollout_id, error)

    def _new_name(self, index: int, asked: str) -> str:
        """The turn, then the name as it was asked for, with a number if that is taken: fit to be a file's name."""
        path = PurePosixPath(re.sub(r"[^A-Za-z0-9._-]+", "-", asked)[-_NAME_CHARS:])
        tries = ("" if number == 1 else f"-{number}" for number in count(1))
        name = next(name for more in tries if (name := f"{index}-{path.stem}{more}{path.suffix}") not in self._names)
        self._names.add(name)
        return name


def _rules(raw: dict[str, Any]) -> Rules:
    return Rules(
        template_kwargs=raw.get("chat_template_kwargs") or {},
        keep_rewritten=raw.get("rewritten_history") == "keep",
        max_staleness=raw.get("max_staleness"),
        restart_stale=raw.get("on_stale") == "restart",
    )


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
