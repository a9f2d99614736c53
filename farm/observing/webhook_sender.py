"""The sender of webhooks, a thread of the leading dispatcher that delivers the outbox, each message at least once.

A message is signed: `farm-signature: sha256=HEX` is the HMAC of `farm-timestamp`, a dot and the body, with
FARM_WEBHOOK_SECRET. `farm-delivery` is its id, the same for every retry. Redirects are not followed, and only the
status of an answer is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import orjson

from farm.configuration.secret_values import shown_host
from farm.errors import StoreUnavailable
from farm.observing.periodic_thread import PeriodicThread
from farm.observing.webhook_forms import body_of
from farm.store.database import Store
from farm.store.webhooks import outbox
from farm.store.webhooks.outbox import Outgoing

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_AT_A_TIME = 8
_TIMEOUT_S = 10.0
"""Seconds for one message, from the DNS lookup to the status, however slowly a receiver sends its answer."""


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a message, which its receiver can recompute."""
    return "sha256=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


class WebhookSender(PeriodicThread):
    """Sends due messages every second while `leads` returns True, a few at a time, so that a hanging one delays few."""

    def __init__(
        self, store: Store, leads: Callable[[], bool], secret: str = "", timeout_s: float = _TIMEOUT_S
    ) -> None:
        super().__init__("webhooks", _PERIOD_S, leads, self.send, log, "Webhooks not sent yet; retrying")
        self._store = store
        self._secret = secret
        self._timeout_s = timeout_s

    def send(self) -> None:
        """Send the messages that are due."""
        messages = self._store.read(partial(outbox.due_messages, limit=4 * _AT_A_TIME))
        if not messages:
            return
        with ThreadPoolExecutor(_AT_A_TIME, "webhook") as pool:
            list(pool.map(self._deliver, messages))
        self._store.write(outbox.forget_abandoned)

    def _deliver(self, message: Outgoing) -> None:
        if self.closed:
            return
        try:
            body = body_of(self._store, message)
            error = "" if body is None else self._refusal(message, orjson.dumps(body))
        except StoreUnavailable:
            raise
        except Exception as broken:
            # a failing message does not stop the others, and `farm doctor` reports it
            error = f"{type(broken).__name__}: {broken}"
        if error:
            log.warning("Webhook to %s was not accepted: %s", shown_host(message.url), error)
            self._store.write(partial(outbox.refused, message=message, error=error))
        else:
            self._store.write(partial(outbox.taken, message=message))

    def _refusal(self, message: Outgoing, body: bytes) -> str:
        """Post a body; return why the receiver did not accept it, "" if it did. Raises the errors of httpx."""
        timestamp = str(int(time.time()))
        headers = {"content-type": "application/json", "farm-delivery": message.message_id, "farm-timestamp": timestamp}
        if self._secret:
            headers["farm-signature"] = signature(self._secret, timestamp, body)
        try:
            status = asyncio.run(self._posted(message.url, headers, body))
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        return "" if 200 <= status < 300 else f"it answered {status}"

    async def _posted(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Post a body; return the status of the answer. Raises TimeoutError."""
        async with (
            asyncio.timeout(self._timeout_s),
            httpx2.AsyncClient(timeout=None, follow_redirects=False) as client,
            client.stream("POST", url, content=body, headers=headers) as answer,
        ):
            return answer.status_code
