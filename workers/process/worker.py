"""One worker process: its store, event loop, claims and engines. Celery tasks use it."""

from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict

from farm.errors import EngineError, NotAllowed
from farm.ids import group_id
from farm.notifications import Signals, redis_client
from farm.records.engine_state import is_reserved
from farm.records.request import BatchSettings, EngineSettings
from farm.records.rollout import Stage
from farm.settings import Settings, settings
from farm.store import batches, migrations, rollouts
from farm.store.access.sealed_secrets import SecretKey
from farm.store.blobs import stored_archives
from farm.store.database import Store
from farm.store.nodes import PROCESS_CONNECTIONS
from farm.store.rollouts import Claim
from workers.config import WorkerConfig
from workers.plugins.interfaces import ChatModel, Policy
from workers.policy.engines import open_engine
from workers.policy.generation import EngineAddress
from workers.policy.policy import PromptRules, RolloutPolicy
from workers.policy.role_models import RoleModels
from workers.policy.routing.load import SharedLoads
from workers.policy.routing.pool import DedicatedEngines, EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.process.engine_registry import EngineRegistry
from workers.process.lease_renewal import Leases
from workers.process.lender import Lender
from workers.process.loop import Loop
from workers.process.node_breaker import NodeBreaker
from workers.process.recorder import AttemptLayers, AttemptRecorder
from workers.process.supervision import owner_name
from workers.process.watchdog import Watchdog
from workers.sandboxes.processes.fork_client import close_fork_client
from workers.stages.stage_job import StageJob
from workers.stages.task_archives import fetch_archive

_CACHE_SIZE = 256

T = TypeVar("T")


class StoredRequest(BatchSettings):
    """A batch's request without its instances, with the fields that the stages need."""

    model_config = ConfigDict(extra="ignore")

    engines: Sequence[EngineSettings] = ()
    """The dedicated engines of the batch and its instances; `engine` and `engine_of_instance` are indices into it."""
    engine: int | None = None
    engine_of_instance: Mapping[int, int] = {}

    def engine_for(self, group_index: int) -> EngineAddress | None:
        """Return the dedicated engine of an instance; None if it uses the farm's engines."""
        number = self.engine_of_instance.get(group_index, self.engine)
        if number is None:
            return None
        engine = self.engines[number]
        return EngineAddress(
            engine.engine_url,
            engine.engine_model or self.model,
            engine.engine_key or "none",
            engine.engine_tokenizer,
            engine.engine_tool_format,
            plain_chat=engine.engine_route == "chat",
        )

    @property
    def rules(self) -> PromptRules:
        return PromptRules(
            template_kwargs=self.chat_template_kwargs,
            keep_rewritten=self.rewritten_history == "keep",
            max_staleness=self.max_staleness,
            restart_stale=self.on_stale == "restart",
            max_row_tokens=self.limits.max_row_tokens,
            max_response_tokens=self.limits.max_response_tokens,
            max_prompt_tokens=self.limits.max_prompt_tokens,
        )


class Worker:
    """The store, event loop, leases, engines and caches that all tasks of this process share."""

    def __init__(self, pool: str, options: Settings) -> None:
        self.node = options.node
        self.options = options
        self.config = WorkerConfig.of(options)
        self.owner = owner_name(options.node, pool, os.getpid())
        # results are kept and written later, however long the database is unavailable
        self.store = Store(
            options.database_url,
            patience_s=math.inf,
            n_connections=PROCESS_CONNECTIONS,
            # a renewal is due after a third of the lease; if it has to wait for another one, a third is left
            urgent_s=options.lease_s / 3,
        )
        migrations.check(self.store)
        self._secret_key = SecretKey.of(options, self.store.engine.url)
        self.signals = Signals(options.broker_url)
        self.loop = Loop()
        self.breaker = NodeBreaker(self.store, self.signals, pool, options.node, options.node_timeout_s)
        self.leases = Leases(self.store, self.signals, self.owner, options.lease_s, options.stall_s)
        self.watchdog = Watchdog(self.loop, self.leases, options.stall_s)
        self.watchdog.start()
        self.engine_registry = EngineRegistry(self.store, self.signals, self.owner, self._secret_key)
        redis = redis_client(options.broker_url)
        self.loads = SharedLoads(redis, self.owner) if redis is not None else None
        client = partial(open_engine, timeout_s=options.policy_timeout_s)
        self.engines = EnginePool(
            self.engine_registry, reporter=self.engine_registry, others=self.loads, open_engine=client
        )
        self.dedicated_engines = DedicatedEngines(self.loop.call, client, away_s=options.engine_away_s)
        self.engine_registry.on_change = self.engines.changed
        self._watched: Once[EnginePool] = Once(self._watch_engines)
        self.role_models = RoleModels(self.dedicated_engines, self._watched)
        self._lender = Lender(self.store, self.signals, self.loop, options)
        if pool == Stage.RUN:
            self._watched()
            self._lender.start()
        self._request = lru_cache(_CACHE_SIZE)(self._read_request)
        self._instance = lru_cache(_CACHE_SIZE)(self._read_instance)

    def _watch_engines(self) -> EnginePool:
        """Watch the farm's engines, even without running rollouts: new ones are probed and receive their orders."""
        self.engine_registry.start()
        if self.loads is not None:
            self.loads.start(self.engines.load_tracker)
        self.loop.run(self.engines.start())
        return self.engines

    def claim(self, rollout_id: str, attempt: int, stage: Stage) -> Claim | None:
        """Claim a stage; None if it cannot be claimed here, or this worker is about to exit."""
        if self.leases.draining:
            return None
        node, owner, lease_s = self.node, self.owner, self.options.lease_s
        tries: list[float] = []
        return self.store.write(
            lambda connection: rollouts.claim(connection, rollout_id, attempt, stage, node, owner, lease_s, tries),
            rollout_id=rollout_id,
        )

    def job(self, claim: Claim) -> StageJob:
        return self.job_of(claim.batch_id, claim.group_index, claim.rollout_id, claim.attempt, claim.sample_index)

    def job_of(self, batch_id: str, group_index: int, rollout_id: str, attempt: int, sample_index: int) -> StageJob:
        request = self._request(batch_id)
        data_source, fields, archive = self._instance(batch_id, group_index)
        return StageJob(
            rollout_id=rollout_id,
            attempt=attempt,
            sample_index=sample_index,
            data_source=data_source,
            fields=fields,
            batch=request,
            sandbox_kind=request.sandbox if request.sandbox != "auto" else self.options.sandbox,
            group_id=group_id(batch_id, group_index),
            group_index=group_index,
            rules=request.rules,
            engine=request.engine_for(group_index),
            archive=archive,
            config=self.config,
        )

    def fetch_archive(self, job: StageJob) -> None:
        """Download the archive of a job to this node, if it has one. Blocks."""
        if job.archive:
            ask = partial(stored_archives.part, digest=job.archive)
            folder = job.config.archives_folder
            fetch_archive(folder, job.archive, lambda number: self.store.read(partial(ask, number=number)))

    def recorder(self, claim: Claim) -> AttemptRecorder:
        return AttemptRecorder(self.store, claim, self.options.artefacts_mb)

    def layers(self, claim: Claim) -> AttemptLayers:
        return AttemptLayers(self.store, claim, self.options.layer_mb)

    def _read_request(self, batch_id: str) -> StoredRequest:
        stored = self.store.read(lambda connection: batches.request_of(connection, batch_id))
        try:
            return StoredRequest.model_validate(self._secret_key.unseal_request(stored))
        except NotAllowed as error:
            raise EngineError(str(error)) from None

    def _read_instance(self, batch_id: str, group_index: int) -> tuple[str, dict[str, Any], str]:
        return self.store.read(lambda connection: batches.instance_fields(connection, batch_id, group_index))

    @contextmanager
    def policy(self, job: StageJob) -> Iterator[Policy]:
        """Yield the policy of one rollout, on its dedicated engine or on the farm's engines as of each call."""
        if job.engine is None:
            yield _policy(self.engines, job, job.batch.model)
            return
        with self.dedicated_engines.pool(job.engine) as pool:
            yield _policy(pool, job, job.engine.model)

    @contextmanager
    def models(self, job: StageJob) -> Iterator[Mapping[str, ChatModel]]:
        """Yield the LLMs of the batch's roles other than the policy, by role."""
        with self.role_models.of(job.batch.roles, job.rollout_id) as models:
            yield models

    def close(self) -> None:
        self._lender.close()
        self.watchdog.close()
        self.leases.close()
        self.loop.run(self.engines.aclose())
        self.loop.run(self.dedicated_engines.aclose())
        if self.loads is not None:
            self.loads.close()
        self.engine_registry.close()
        self.store.close()
        self.signals.close()
        close_fork_client()


def _policy(engines: EnginePool, job: StageJob, model: str) -> Policy:
    router = StickyRouter(engines, RoutingKey(job.rollout_id, job.group_id, model))
    return RolloutPolicy(router, job.rollout_id, "" if is_reserved(model) else model, job.rules)


class Once(Generic[T]):
    """A value that is created at the first call, and only once even if several threads call at the same time.

    `functools.lru_cache` would call the function in each thread, and each thread would get another worker: claims of
    one would not be found in the other. If the creation fails, the next call tries again.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: T | None = None

    def __call__(self) -> T:
        if self._value is None:
            with self._lock:
                if self._value is None:
                    self._value = self._make()
        return self._value

    @property
    def made(self) -> T | None:
        """The value, if it was created already."""
        return self._value


def _open_worker() -> Worker:
    # a shell or a kernel needs about six descriptors, and a worker has hundreds of them
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    options = settings()
    return Worker(options.pool, options)


worker: Once[Worker] = Once(_open_worker)
"""This process's worker."""
