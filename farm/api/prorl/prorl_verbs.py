"""The routes of ProRL's protocol; its errors are `{"detail": …}`."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from farm.api.auth import RouteScopes
from farm.api.endpoints import Endpoints
from farm.api.prorl.job_requests import CancelRequest, LlmServerRequest, ProcessRequest
from farm.api.prorl.jobs import Askers, Job, Jobs, RequestedJob
from farm.api.protocols import WireProtocol, await_batch, refuse_with_detail
from farm.api.schemas import ApiRequest, RequestRejected
from farm.callers import Scope
from farm.client.http_errors import ProblemDetails
from farm.errors import NotFound, ServiceError
from farm.records.rollout import Stage, State

_CLIENT = re.compile(r"[A-Za-z0-9_-]{1,40}")
_MARGIN_S = 10.0
"""Seconds that a request waits for its result beyond the time of two runs."""


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._askers = Askers(endpoints)

    def routes(self) -> list[BaseRoute]:
        """Return each route twice: for the client without a name, and below the name of a client."""
        return [route for prefix in ("", "/{client}") for route in self._of(prefix)]

    def _of(self, prefix: str) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.post(f"{prefix}/start", self._start, takes_body=False),
            endpoints.post(f"{prefix}/stop", self._stop, takes_body=False),
            endpoints.get(f"{prefix}/status", self._status),
            endpoints.post(f"{prefix}/add_llm_server", self._add),
            endpoints.post(f"{prefix}/clear_llm_server", self._clear, takes_body=False),
            endpoints.post(f"{prefix}/cancel", self._cancel),
            endpoints.route("POST", f"{prefix}/process", self._process),
        ]

    def _jobs(self, request: ApiRequest) -> Jobs:
        client = request.path.get("client", "")
        if client and not _CLIENT.fullmatch(client):
            raise NotFound("a client's name in the path must consist of up to 40 of A-Z, a-z, 0-9, _ and -")
        return Jobs(self._endpoints.farm, self._askers, client)

    def _start(self, request: ApiRequest) -> dict[str, str]:
        self._jobs(request).start()
        return {"status": "Server started successfully"}

    def _stop(self, request: ApiRequest) -> dict[str, str]:
        self._jobs(request).stop()
        return {"status": "Server stopped successfully"}

    def _status(self, request: ApiRequest) -> dict[str, Any]:
        """Answer with the fields of both servers, the one with processes and the one with threads."""
        counts = self._jobs(request).counts()
        n_open = sum(counts.values())
        queued = {stage: counts.get((stage, State.QUEUED), 0) for stage in Stage}
        active = {stage: counts.get((stage, State.ACTIVE), 0) for stage in Stage}
        by_process = {"running": True, "jobs": n_open, **{stage.value: active[stage] for stage in Stage}}
        by_thread = {f"{stage.value}_queue": queued[stage] for stage in Stage}
        by_thread |= {f"active_{stage.value}": active[stage] for stage in Stage} | {"total": n_open}
        return {"status": "running", "pending_jobs": n_open, **by_process, **by_thread}

    def _add(self, request: ApiRequest) -> dict[str, str]:
        address = request.parse_body(LlmServerRequest).address
        session = self._jobs(request).add_server(address)
        return {"status": f"{'Added' if session.running else 'Buffered'} LLM server address: {address}"}

    def _clear(self, request: ApiRequest) -> dict[str, str]:
        session = self._jobs(request).clear_servers()
        words = "Cleared all LLM server addresses" if session.running else "Cleared buffered LLM server addresses"
        return {"status": words}

    def _cancel(self, request: ApiRequest) -> dict[str, str]:
        job_id = request.parse_body(CancelRequest).job_id
        try:
            self._jobs(request).cancel(job_id)
        except NotFound:
            if not self._endpoints.config.strict_compat:
                raise
        return {"status": f"Cancel requested for job {job_id}"}

    async def _process(self, request: ApiRequest) -> dict[str, Any]:
        """Answer once the rollout has ended; no thread waits for it.

        A client that gives up, or whose API is killed, may ask again and continues to wait for the same rollout. Once
        its answer was given, the same request gets another rollout, as on that server.
        """
        endpoints, askers = self._endpoints, self._askers
        jobs = self._jobs(request)
        wanted = await endpoints.run(_requested, jobs, request)
        is_disconnected = request.is_disconnected
        # released here, as it may be large and the wait long
        del request
        key, job = await self._begun(jobs, wanted)
        del wanted
        is_answered = False
        try:
            await await_batch(
                endpoints, job.batch_id, 2 * endpoints.config.prorl_timeout_s + _MARGIN_S, is_disconnected
            )
            result = await endpoints.run(jobs.result, job)
            if await is_disconnected():
                raise ClientDisconnect
            is_answered = await endpoints.run(askers.drop, key)
            if not is_answered:
                raise ServiceError(f"another request took over {job.batch_id}: send this one again")
            return result
        except RequestRejected as unfinished:
            if endpoints.config.strict_compat and unfinished.problem.status == 504:
                problem = ProblemDetails(500, "ServiceError", "Failed to process job: 504: Processing timed out")
                raise RequestRejected(problem) from None
            raise
        finally:
            if not is_answered:
                await endpoints.run(askers.leave, key)

    async def _begun(self, jobs: Jobs, wanted: RequestedJob) -> tuple[str, Job]:
        """Return a rollout of a job, new or found, and its claimed key. Broken rollouts are skipped."""
        endpoints, askers = self._endpoints, self._askers
        while True:
            key = await askers.claim(wanted.name)
            try:
                job = await endpoints.run(jobs.submit, wanted, key, endpoints.config.prorl_timeout_s)
            except ServiceError:
                # it may have been written nevertheless
                await endpoints.run(askers.leave, key)
                raise
            except BaseException:
                await endpoints.run(askers.drop, key)
                raise
            if job is not None:
                return key, job
            await endpoints.run(askers.drop, key)


def _requested(jobs: Jobs, request: ApiRequest) -> RequestedJob:
    session = jobs.serving()
    return jobs.requested(session, request.parse_body(ProcessRequest))


_SCOPES: RouteScopes = {
    (method, f"{prefix}/{verb}"): scope
    for prefix in ("", "/{client}")
    for method, verb, scope in (
        ("POST", "start", Scope.SUBMIT),
        ("POST", "stop", Scope.SUBMIT),
        ("GET", "status", Scope.READ),
        ("POST", "add_llm_server", Scope.SUBMIT),
        ("POST", "clear_llm_server", Scope.SUBMIT),
        ("POST", "cancel", (Scope.SUBMIT, Scope.OPERATE)),
        ("POST", "process", Scope.SUBMIT),
    )
}

PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
