"""Borrowed sandboxes through the API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from farm.client.http_connection import ApiConnection
from farm.client.sandboxes.borrower import Borrower
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest
from farm.records.lending.sandbox_calls import CALLS, VERBS
from farm.records.request_values import Request

_PATH = "/v1/sandboxes"


class RemoteBorrower(Borrower):
    """The verbs as requests to an API. Calls have ids, so each is executed once however often it is sent."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def begin(self, request: BorrowRequest) -> BorrowedSandbox:
        body = request.model_dump(mode="json", exclude_defaults=True)
        # without a name, a resent request would start a second sandbox
        return self._api.post(BorrowedSandbox, _PATH, body, repeatable=bool(request.name))

    def watched(self, reference: str, wait_s: float) -> BorrowedSandbox:
        return self._api.get(BorrowedSandbox, self._of(reference), wait_s=wait_s)

    def list(self, limit: int = 100, ended: bool = False, before: str | None = None) -> Sequence[BorrowedSandbox]:
        older: dict[str, Any] = {} if before is None else {"before": before}
        return self._api.get(list[BorrowedSandbox], _PATH, limit=limit, ended=str(ended).lower(), **older)

    def renew(self, reference: str, lease_s: float | None = None) -> BorrowedSandbox:
        return self._api.post(BorrowedSandbox, f"{self._of(reference)}/renew", {"lease_s": lease_s})

    def stop(self, reference: str) -> BorrowedSandbox:
        return self._api.post(BorrowedSandbox, f"{self._of(reference)}/stop", {})

    def call(self, reference: str, call: Request) -> Any:
        verb = VERBS[type(call)]
        body = call.model_dump(mode="json", exclude_defaults=True)
        wait_s, call_id = getattr(call, "timeout_s", 0.0), secrets.token_hex(16)
        return self._api.post(CALLS[verb][1], f"{self._of(reference)}/{verb}", body, wait_s=wait_s, call_id=call_id)

    @staticmethod
    def _of(reference: str) -> str:
        return f"{_PATH}/{quote(reference, safe='')}"
