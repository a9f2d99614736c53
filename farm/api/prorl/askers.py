"""Claims on rollouts: a rollout of `/process` belongs to one request until its answer is given.

A request that is repeated after a broken connection, or a killed API, gets the rollout that it began; two concurrent
requests for one job are two samples. To distinguish these cases, each process of the API has a lease in the store while
requests wait in it, and a request's claim is valid as long as that lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Collection
from functools import partial
from typing import Any

from sqlalchemy import Connection

from farm.api.endpoints import Endpoints
from farm.api.protocol_parts.content_hash import content_hash
from farm.errors import FarmError
from farm.store import leader
from farm.store.database import Work

log = logging.getLogger(__name__)

_LEASE_S = 10.0
_RENEW_S = 1.0
_POLL_S = 0.5
_MARK_CHARS = 8


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
