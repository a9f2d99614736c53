"""Jobs: a request of `/process`, validated and submitted; ended by `/cancel`, `/stop` or its client's disconnect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from farm.api.prorl import job_requests
from farm.api.prorl.askers import Askers
from farm.api.prorl.job_results import result_of
from farm.api.prorl.listed_models import check_lists_models
from farm.api.prorl.requests import ProcessRequest, SamplingMix
from farm.api.prorl.sessions import Session, change, current, next_epoch, started
from farm.client.local import LocalFarm
from farm.engine_urls import normal_url
from farm.errors import InvalidRequest, NotAllowed, NotFound, ServiceError
from farm.ids import rollout_id
from farm.records.rollout import Stage, State
from farm.settings import settings
from farm.store.reports import open_by_key, submissions

_IDS = ("instance_id", "trajectory_id")


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

    def session(self) -> Session:
        return current(self._farm.runs, self._client)

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
            return next_epoch(session) if was_running else started(session)

        session = change(self._farm.runs, self._client, begin)
        if was_running:
            self._end_abandoned(session)
            raise NotAllowed("Server is already running")

    def stop(self) -> None:
        """End the session, and cancel its open jobs. Jobs of others are not touched.

        Of two concurrent stops, both make sure that nothing of it is left.
        """
        session = self.running()

        def end(newest: Session) -> Session:
            return newest if newest.number != session.number else _stopped(newest)

        change(self._farm.runs, self._client, end)
        self._cancel(self._open(session))

    def add_server(self, address: str) -> Session:
        """Add an LLM server for future jobs, before or after the start. Raises InvalidRequest."""
        try:
            normal_url(address)
        except InvalidRequest as error:
            raise InvalidRequest(error.complaints[0][1], field="address") from None

        def add(session: Session) -> Session:
            return _with_servers(session, tuple(dict.fromkeys([*session.servers, address])))

        return change(self._farm.runs, self._client, add)

    def clear_servers(self) -> Session:
        """Remove the added servers, and begin an epoch; jobs that run there continue.

        Rollouts of earlier epochs without a waiting request are cancelled.
        """
        session = change(self._farm.runs, self._client, lambda session: _with_servers(next_epoch(session), ()))
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

    def submit(self, wanted: RequestedJob, key: str) -> Job | None:
        """Submit a rollout of a job by its key, or find it; None if it broke or was cancelled.

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
        batch = job_requests.batch_request(request, wanted.sampling, server, key, settings().prorl_timeout_s)
        try:
            batch_id = self._farm.submit(batch)
        except InvalidRequest as error:
            raise job_requests.named_as_sent(error) from None
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
        submission = self._farm.store.read(partial(submissions.submission, rollout_id=name))
        calls, timings = self._farm.calls(name), self._farm.timings(name)
        return result_of(job.ids, job.sampling, rollout, calls, timings, submission)

    def cancel(self, job_id: str) -> None:
        """Cancel a job of this session, if it is open. Raises ServerNotRunning, and NotFound for an unknown id."""
        session = self.running()
        prefix = f"{session.job_prefix}{job_requests.named_job(job_id)}:"
        named = self._farm.store.read(partial(open_by_key.batches_named, prefix=prefix))
        if not named:
            raise NotFound(f"there is no job {job_id!r} in this session")
        self._cancel(named)

    def counts(self) -> dict[tuple[Stage, State], int]:
        """Return the number of open jobs of the session, by stage and state. Raises ServerNotRunning."""
        return self._farm.store.read(partial(open_by_key.open_counts, prefix=self.running().prefix))

    def _open(self, session: Session) -> dict[str, str]:
        """Return the open batches of a session: id → key."""
        return self._farm.store.read(partial(open_by_key.open_batches, prefix=session.prefix))

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


def _stopped(session: Session) -> Session:
    return replace(session, running=False)


def _with_servers(session: Session, servers: tuple[str, ...]) -> Session:
    return replace(session, servers=servers)
