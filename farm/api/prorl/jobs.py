"""Jobs: a request of `/process` submitted once, found again, and ended by `/cancel` or `/stop`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from farm.api.prorl import job_requests
from farm.api.prorl.job_results import result_of
from farm.api.prorl.requests import ProcessRequest, SamplingMix
from farm.api.prorl.sessions import Session, change, current, started
from farm.client.local import LocalFarm
from farm.engine_urls import normal_url
from farm.errors import Conflict, InvalidRequest, NotAllowed, NotFound, ServiceError
from farm.ids import rollout_id
from farm.records.rollout import Stage, State
from farm.settings import settings
from farm.store.reports import open_by_key, submissions

_ASKED = "prorl"
_IDS = ("instance_id", "trajectory_id")


class ServerNotRunning(ServiceError):
    """The client has not called `/start`, or has called `/stop` since."""

    def __init__(self) -> None:
        super().__init__("Server is not running. Please start the server first.")


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was submitted: a batch of one rollout. `ids` are those of its instance that the result repeats."""

    ids: dict[str, Any]
    sampling: SamplingMix
    batch_id: str


class Jobs:
    """The jobs of one client of a farm."""

    def __init__(self, farm: LocalFarm, client: str) -> None:
        self._farm = farm
        self._client = client

    def session(self) -> Session:
        return current(self._farm.runs, self._client)

    def running(self) -> Session:
        """Return the session. Raises ServerNotRunning."""
        session = self.session()
        if not session.running:
            raise ServerNotRunning
        return session

    def start(self) -> None:
        """Begin a session. Raises NotAllowed if one runs."""

        def begin(session: Session) -> Session:
            if session.running:
                raise NotAllowed("Server is already running")
            return started(session)

        change(self._farm.runs, self._client, begin)

    def stop(self) -> None:
        """End the session, and all in it that has not ended. What others submitted is not touched.

        Of two that stop it, both see to it that nothing of it is left.
        """
        session = self.running()

        def end(newest: Session) -> Session:
            return newest if newest.number != session.number else _stopped(newest)

        change(self._farm.runs, self._client, end)
        self._cancel(self._farm.store.read(partial(open_by_key.open_batches, prefix=session.prefix)))

    def add_server(self, address: str) -> Session:
        """Add an LLM server for jobs to come, before or after the start. Raises InvalidRequest."""
        try:
            normal_url(address)
        except InvalidRequest as error:
            raise InvalidRequest(error.complaints[0][1], field="address") from None

        def add(session: Session) -> Session:
            return _with_servers(session, tuple(dict.fromkeys([*session.servers, address])))

        return change(self._farm.runs, self._client, add)

    def clear_servers(self) -> Session:
        """Send no more jobs to the servers that were added; those that play there go on."""
        return change(self._farm.runs, self._client, lambda session: _with_servers(session, ()))

    def submit(self, request: ProcessRequest) -> Job:
        """Submit a job, or find the one that was submitted by the same request in this session.

        Raises ServerNotRunning, InvalidRequest, UnknownHandler, Conflict, and ServiceError if there is no LLM server.
        """
        session = self.running()
        sampling = job_requests.sampling_of(request)
        job = job_requests.job_of(request)
        content = job_requests.content_of(request)
        ids = {name: request.instance[name] for name in _IDS if name in request.instance}
        key = partial(job_requests.key_of, session.prefix, job)
        known = self._farm.runs.keyed_batches([key(server) for server in session.servers or ("",)])
        if known:
            if known[0].metadata.get(_ASKED) != content:
                raise Conflict(f"job_id {request.job_id!r} asked for something else in this session: give another")
            return Job(ids, sampling, known[0].batch_id)
        if not session.servers and not self._farm.engines():
            raise ServiceError("No LLM server addresses configured. Please add at least one LLM server address.")
        server = job_requests.server_of(request, session.servers)
        play_s = settings().prorl_timeout_s
        batch = job_requests.batch_request(request, sampling, server, key(server), play_s, {_ASKED: content})
        try:
            batch_id = self._farm.submit(batch)
        except InvalidRequest as error:
            raise job_requests.named_as_sent(error) from None
        newest = self.session()
        if not newest.running or newest.number != session.number:
            # it was stopped meanwhile, and whoever did that may not have seen this job
            self._cancel([batch_id])
            raise ServerNotRunning
        return Job(ids, sampling, batch_id)

    def result(self, job: Job) -> dict[str, Any]:
        """Return the result object of an ended job."""
        name = rollout_id(job.batch_id, 0, 0)
        rollout = self._farm.rollout(name)
        submission = self._farm.store.read(partial(submissions.submission, rollout_id=name))
        calls, timings = self._farm.calls(name), self._farm.timings(name)
        return result_of(job.ids, job.sampling, rollout, calls, timings, submission)

    def cancel(self, job_id: str) -> None:
        """End a job of this session, if it has not ended. Raises ServerNotRunning, and NotFound for an unknown id."""
        session = self.running()
        prefix = f"{session.prefix}{job_requests.named_job(job_id)}:"
        named = self._farm.store.read(partial(open_by_key.batches_named, prefix=prefix))
        if not named:
            raise NotFound(f"there is no job {job_id!r} in this session")
        self._cancel(named)

    def counts(self) -> dict[tuple[Stage, State], int]:
        """Return how many jobs of the session have not ended, by stage and state. Raises ServerNotRunning."""
        return self._farm.store.read(partial(open_by_key.open_counts, prefix=self.running().prefix))

    def _cancel(self, batch_ids: list[str]) -> None:
        for batch_id in batch_ids:
            self._farm.cancel(batch_id)


def _stopped(session: Session) -> Session:
    return Session(session.client, session.number, False, session.servers)


def _with_servers(session: Session, servers: tuple[str, ...]) -> Session:
    return Session(session.client, session.number, session.running, servers)
