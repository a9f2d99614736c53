"""Jobs: a request of `/process`, validated and submitted; ended by `/cancel`, `/stop` or its client's disconnect.

A client is the NAME of the path `/prorl/NAME/…`, or empty. A client that died sends no `/stop`, so a session is divided
into epochs. A restarted client begins an epoch: by clearing the list of servers, or by `/start` while a session runs. A
job is found only in its own epoch.

A rollout belongs to one request until its answer is given. A request that is repeated after a broken connection, or a
killed API, gets the rollout that it began; two concurrent requests for one job are two samples. To distinguish these
cases, each process of the API has a lease in the store while requests wait in it, and a request's claim is valid as
long as that lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import httpx2
from sqlalchemy import Connection

from farm.api.endpoints import Endpoints
from farm.api.prorl import job_requests
from farm.api.prorl.job_requests import ProcessRequest, SamplingMix
from farm.api.prorl.job_results import result_of
from farm.api.protocols import KeptState, content_hash
from farm.client.local import LocalFarm
from farm.configuration.service_urls import normal_url
from farm.errors import FarmError, InvalidRequest, NotAllowed, NotFound, ServiceError
from farm.ids import rollout_id
from farm.records.rollout import Stage, State
from farm.store import leader
from farm.store.database import Work
from farm.store.reports import keyed_rollouts

log = logging.getLogger(__name__)

_LEASE_S = 10.0
_RENEW_S = 1.0
_POLL_S = 0.5
_MARK_CHARS = 8

_IDS = ("instance_id", "trajectory_id")
_ASK_S = 3.0
_KNOWN_S = 30.0
"""Seconds until a server that passed the check is asked again."""


class Askers:
    """The requests of this process that wait for rollouts, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._store = endpoints.farm.store
        self._process = f"api-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._renewing: threading.Thread | None = None

    async def claim(self, job: str) -> str:
        """Claim a rollout of a job, an abandoned one whose answer is still due or else another one; return its key.

        If another process has a claim on one, this waits until it is known whether that process is alive or has ended.
        """
        known_ends: dict[str, float] = {}
        while True:
            key = await self._endpoints.run(self._claim, job, known_ends)
            if key is not None:
                return key
            await asyncio.sleep(_POLL_S)

    def leave(self, key: str) -> None:
        """Release a rollout for the next request of its job."""
        try:
            self._store.write(partial(leader.pass_claim, role=_role(key), owner=self._process, to=""))
        finally:
            self._let_go(key)

    def drop(self, key: str) -> bool:
        """Delete the claim when the answer is given, so that nobody else gets it.

        False if another request took it over.
        """
        try:
            return self._store.write(partial(leader.drop_claim, role=_role(key), owner=self._process))
        finally:
            self._let_go(key)

    def held(self, keys: Collection[str]) -> set[str]:
        """Return the keys that a request waits for, in any process."""
        claims = self._store.read(
            lambda connection: leader.claims_named(connection, [_role(key) for key in keys], _LEASE_S)
        )
        roles = {claim.role for claim in claims if claim.is_held}
        return {key for key in keys if _role(key) in roles}

    def _claim(self, job: str, known_ends: dict[str, float]) -> str | None:
        """Claim a rollout; None while it is unknown whether another process that has a claim on one is alive."""

        def claim(connection: Connection) -> str | None:
            leader.acquire_leadership(connection, self._process, self._process, _LEASE_S)
            is_settled = True
            for each in leader.claims_of(connection, f"{_of_job(job)}-", _LEASE_S):
                if each.lease_end is None:
                    if leader.pass_claim(connection, each.role, each.owner, self._process):
                        return each.role
                elif each.owner != self._process:
                    is_settled &= known_ends.setdefault(each.owner, each.lease_end) < each.lease_end
            if not is_settled:
                return None
            role = f"{_of_job(job)}-{secrets.token_hex(_MARK_CHARS // 2)}"
            leader.add_claim(connection, role, self._process)
            return role

        role = self._store.write(claim)
        if role is None:
            return None
        key = f"{job}:{role[-_MARK_CHARS:]}"
        with self._lock:
            self._held.add(key)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="prorl-askers", daemon=True)
                self._renewing.start()
        return key

    def _let_go(self, key: str) -> None:
        with self._lock:
            self._held.discard(key)

    def _renew(self) -> None:
        """Renew the lease of this process for as long as requests wait."""
        pause = threading.Event()
        renew = partial(leader.acquire_leadership, role=self._process, owner=self._process, lease_s=_LEASE_S)
        self._attempt(leader.forget_ended)
        while True:
            with self._lock:
                if not self._held or self._endpoints.is_closed:
                    self._renewing = None
                    return
            self._attempt(renew)
            pause.wait(_RENEW_S)

    def _attempt(self, work: Work[Any]) -> None:
        try:
            self._store.write(work)
        except FarmError as error:
            log.warning("Lease of %s not renewed: %s", self._process, error)


def _of_job(job: str) -> str:
    return content_hash(job)[:20]


def _role(key: str) -> str:
    job, _, mark = key.rpartition(":")
    return f"{_of_job(job)}-{mark}"


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a client, from `/start` to `/stop`, with the LLM servers that it added.

    `number` counts the starts, `epoch` the epochs of a session; `running` is False after a stop.
    """

    client: str
    number: int = 0
    running: bool = False
    servers: tuple[str, ...] = ()
    epoch: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the idempotency keys of its rollouts."""
        return f"prorl:{self.client}:{self.number}:"

    @property
    def job_prefix(self) -> str:
        """The prefix of the idempotency keys of the current epoch."""
        return f"{self.prefix}{self.epoch}:"


def _session(record: Mapping[str, Any], client: str) -> Session:
    if not record:
        return Session(client)
    return Session(client, record["number"], record["running"], tuple(record["servers"]), record.get("epoch", 0))


class ServerNotRunning(ServiceError):
    """The client has not called `/start`, or has called `/stop` since."""

    def __init__(self) -> None:
        super().__init__("Server is not running. Please start the server first.")


@dataclass(frozen=True, slots=True)
class RequestedJob:
    """A validated request of `/process` in a session: `name` is the prefix of the keys of all its rollouts."""

    request: ProcessRequest
    sampling: SamplingMix
    session: Session
    name: str


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job: a batch of one rollout. `ids` are those of its instance that the result repeats."""

    ids: dict[str, Any]
    sampling: SamplingMix
    batch_id: str


class Jobs:
    """The jobs of one client of a farm."""

    def __init__(self, farm: LocalFarm, askers: Askers, client: str) -> None:
        self._farm = farm
        self._askers = askers
        self._client = client
        self._state = KeptState(farm.runs, f"prorl:{client}")

    def session(self) -> Session:
        """Return the client's newest session."""
        return _session(self._state.read(), self._client)

    def _change(self, to: Callable[[Session], Session]) -> Session:
        """Replace the newest session by `to(session)`, and return it. `to` may run more than once, and may raise."""

        def changed(record: Mapping[str, Any]) -> Mapping[str, Any]:
            session = to(_session(record, self._client))
            return {**asdict(session), "servers": list(session.servers)}

        return _session(self._state.change(changed), self._client)

    def running(self) -> Session:
        """Return the running session. Raises ServerNotRunning."""
        session = self.session()
        if not session.running:
            raise ServerNotRunning
        return session

    def start(self) -> None:
        """Start a session. If one runs, begins an epoch and raises NotAllowed."""
        was_running = False

        def begin(session: Session) -> Session:
            nonlocal was_running
            was_running = session.running
            if was_running:
                return replace(session, epoch=session.epoch + 1)
            return replace(session, number=session.number + 1, running=True, epoch=0)

        session = self._change(begin)
        if was_running:
            self._end_abandoned(session)
            raise NotAllowed("Server is already running")

    def stop(self) -> None:
        """End the session, and cancel its open jobs. Jobs of others are not touched.

        Of two concurrent stops, both make sure that nothing of it is left.
        """
        session = self.running()

        def end(newest: Session) -> Session:
            return newest if newest.number != session.number else replace(newest, running=False)

        self._change(end)
        self._cancel(self._open(session))

    def add_server(self, address: str) -> Session:
        """Add an LLM server for future jobs, before or after the start. Raises InvalidRequest."""
        try:
            normal_url(address)
        except InvalidRequest as error:
            raise InvalidRequest(error.complaints[0][1], field="address") from None

        def add(session: Session) -> Session:
            return replace(session, servers=tuple(dict.fromkeys([*session.servers, address])))

        return self._change(add)

    def clear_servers(self) -> Session:
        """Remove the added servers, and begin an epoch; jobs that run there continue.

        Rollouts of earlier epochs without a waiting request are cancelled.
        """
        session = self._change(lambda session: replace(session, epoch=session.epoch + 1, servers=()))
        if session.running:
            self._end_abandoned(session)
        return session

    def serving(self) -> Session:
        """Return the session, if it has LLM servers. Raises ServerNotRunning, and ServiceError if there is none."""
        session = self.running()
        if not session.servers and not self._farm.engines():
            raise ServiceError("No LLM server addresses configured. Please add at least one LLM server address.")
        return session

    def requested(self, session: Session, request: ProcessRequest) -> RequestedJob:
        """Return the job of a request. Raises InvalidRequest."""
        sampling = job_requests.sampling_of(request)
        name = f"{session.job_prefix}{job_requests.job_of(request)}"
        return RequestedJob(request, sampling, session, name)

    def submit(self, wanted: RequestedJob, key: str, timeout_s: float) -> Job | None:
        """Submit a rollout of a job by its key, or find it; None if it broke or was cancelled.

        `timeout_s` limits its run.

        Raises ServerNotRunning, InvalidRequest and UnknownHandler.
        """
        request, session = wanted.request, wanted.session
        ids = {name: request.instance[name] for name in _IDS if name in request.instance}
        for known in self._farm.runs.keyed_batches([key]):
            rollout = self._farm.rollout(rollout_id(known.batch_id, 0, 0))
            if rollout.state in (State.FAILED, State.CANCELLED):
                return None
            return Job(ids, wanted.sampling, known.batch_id)
        server = job_requests.server_of(request, session.servers, key)
        if server and not wanted.sampling.model_name:
            check_lists_models(server, wanted.sampling.api_key)
        batch = job_requests.batch_request(request, wanted.sampling, server, key, timeout_s)
        try:
            batch_id = self._farm.submit(batch)
        except InvalidRequest as error:
            raise error.renamed(job_requests.sent_name) from None
        newest = self.session()
        if not newest.running or newest.number != session.number:
            # the session was stopped in between, and the stop may have missed this job
            self._cancel([batch_id])
            raise ServerNotRunning
        return Job(ids, wanted.sampling, batch_id)

    def result(self, job: Job) -> dict[str, Any]:
        """Return the result object of an ended job."""
        name = rollout_id(job.batch_id, 0, 0)
        rollout = self._farm.rollout(name)
        submission = self._farm.store.read(partial(keyed_rollouts.submission, rollout_id=name))
        calls, timings = self._farm.calls(name), self._farm.timings(name)
        return result_of(job.ids, job.sampling, rollout, calls, timings, submission)

    def cancel(self, job_id: str) -> None:
        """Cancel a job of this session, if it is open. Raises ServerNotRunning, and NotFound for an unknown id."""
        session = self.running()
        prefix = f"{session.job_prefix}{job_requests.named_job(job_id)}:"
        named = self._farm.store.read(partial(keyed_rollouts.batches_named, prefix=prefix))
        if not named:
            raise NotFound(f"there is no job {job_id!r} in this session")
        self._cancel(named)

    def counts(self) -> dict[tuple[Stage, State], int]:
        """Return the number of open jobs of the session, by stage and state. Raises ServerNotRunning."""
        return self._farm.store.read(partial(keyed_rollouts.open_counts, prefix=self.running().prefix))

    def _open(self, session: Session) -> dict[str, str]:
        """Return the open batches of a session: id → key."""
        return self._farm.store.read(partial(keyed_rollouts.open_batches, prefix=session.prefix))

    def _end_abandoned(self, session: Session) -> None:
        """Cancel jobs of earlier epochs of a session that nobody waits for."""
        earlier = {
            batch_id: key for batch_id, key in self._open(session).items() if not key.startswith(session.job_prefix)
        }
        held = self._askers.held(earlier.values())
        self._cancel([batch_id for batch_id, key in earlier.items() if key not in held])

    def _cancel(self, batch_ids: Iterable[str]) -> None:
        for batch_id in batch_ids:
            self._farm.cancel(batch_id)


def check_lists_models(server: str, key: str | None) -> None:
    """Raise InvalidRequest if a server answers and lists no model.

    A server that is unreachable from here may be reachable from the nodes, or may be about to start.
    """
    _ask(server, key, int(time.monotonic() / _KNOWN_S))


@lru_cache(256)
def _ask(server: str, key: str | None, period: int) -> None:
    """As `check_lists_models`, with cached successes; errors are not cached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.get(f"{normal_url(server)}/models", headers=headers, timeout=_ASK_S)
    except httpx2.HTTPError:
        return
    if answer.status_code in (404, 405) or (answer.status_code == 200 and not _lists_any(answer)):
        wanted = f"is missing, and LLM server {server} lists no model: name the one that it serves"
        raise InvalidRequest(wanted, field="sampling_params.model")


def _lists_any(answer: httpx2.Response) -> bool:
    try:
        return bool(answer.json()["data"])
    except (ValueError, KeyError, TypeError):
        return False
