"""HTTP requests to the API of a farm, retried while it is unavailable.

The API is stateless: after a restart it serves repeated requests as before. Only a request that is not safe to repeat
fails at once if it was sent and not answered.
"""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from farm.client import serialization
from farm.client.http_errors import error_of
from farm.errors import FarmError, FarmUnreachable, InvalidRequest, StoreUnavailable
from farm.home import WAIT_TIMEOUT_S

T = TypeVar("T")

_CONNECT_S = 10.0
_ANSWER_S = 300.0
"""Seconds for an answer beyond the `wait_s` of a request: a huge batch takes long."""
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)
# a machine that crashed without closing its connections is noticed by these, and not only after _ANSWER_S
_TCP = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
_RESTART_FACTOR = 10
"""Factor of the patience once an API has answered, as it restarts; else the address may be wrong."""
_PAUSE_S = (0.05, 1.0)
_TOO_OFTEN = 429
"""The status of a request that was refused because the key's rate is used up."""
_AWAY = {502, 503, 504}
"""Status codes of a proxy while the API is unavailable."""


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """The reason why a request got no answer; `may_be_done`: it may have arrived nevertheless."""

    why: FarmError
    may_be_done: bool


class ApiConnection:
    """A connection to one address, for any number of threads.

    `patience_s` is how long to wait for an API that does not answer, ten times as long once it has answered. Errors
    that it reports, such as an unavailable database, are retried for `patience_s`. `authorities` is a PEM file of the
    authorities that may sign the API's certificate; empty for the system's. Raises InvalidRequest for an invalid
    address, or a file without a certificate.
    """

    def __init__(self, url: str, key: str = "", patience_s: float = WAIT_TIMEOUT_S, authorities: str = "") -> None:
        self.url = _sound(url)
        self._timeout_s = patience_s
        self._has_answered = False
        shown = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._client = httpx2.Client(
            # no proxies from the environment for local addresses; loading certificates takes longer than a request
            trust_env=False,
            transport=httpx2.HTTPTransport(
                verify=_trusted(url, authorities), limits=_LIMITS, socket_options=_TCP, trust_env=False
            ),
            headers=[*shown, (b"accept-encoding", b"identity")],
        )

    def get(self, kind: type[T], path: str, *, wait_s: float = 0.0, patience_s: float | None = None, **query: Any) -> T:
        """Return the answer to a read request. `wait_s` is how long it may take; `patience_s` overrides the
        connection's."""
        params = {name: str(value) for name, value in query.items()}
        if wait_s:
            params["wait_s"] = f"{wait_s:.3f}"
        return self._read(kind, self._ask("GET", path, params, None, wait_s, patience_s=patience_s))

    def pages(self, kind: type[T], path: str, key: Callable[[T], object], limit: int = 1000) -> list[T]:
        """Return a whole list, page by page; `key` of a page's last item asks for the next page."""
        items: list[T] = []
        while True:
            after: dict[str, Any] = {"after": key(items[-1])} if items else {}
            page = self.get(list[kind], path, limit=limit, **after)  # type: ignore[valid-type]
            items += page
            if len(page) < limit:
                return items

    def data(self, path: str, **query: str) -> bytes:
        """Return the bytes of an answer that is not JSON; otherwise like `get`."""
        return self._ask("GET", path, query, None)

    def post(
        self, kind: type[T], path: str, body: Any = None, *, repeatable: bool = True, wait_s: float = 0.0, **query: str
    ) -> T:
        """Send a request that makes changes; unless it is `repeatable`, it is not resent once it may have arrived.

        `wait_s` is how long it may take.
        """
        return self._read(kind, self._ask("POST", path, query, _content(body), wait_s, repeatable=repeatable))

    def close(self) -> None:
        self._client.close()

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: bytes | None,
        wait_s: float = 0.0,
        repeatable: bool = True,
        patience_s: float | None = None,
    ) -> bytes:
        # an explicit patience is the total; otherwise the first answer may take longer
        deadline = None if patience_s is None else time.monotonic() + patience_s
        patience_s = self._timeout_s if patience_s is None else patience_s
        # a request that cannot be sent is the caller's error: no retry
        try:
            request = self._client.build_request(
                method,
                self.url + path,
                params=query,
                content=content,
                headers={"content-type": "application/json"} if content is not None else {},
                timeout=httpx2.Timeout(_ANSWER_S + wait_s, connect=min(_CONNECT_S, max(patience_s, 1.0)), pool=None),
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise InvalidRequest(f"cannot be sent: {error}", field="request") from error
        for pause_s in _pauses():
            answer = self._tried(request)
            if isinstance(answer, bytes):
                return answer
            if deadline is None:
                is_restarting = self._has_answered and isinstance(answer.why, FarmUnreachable)
                deadline = time.monotonic() + patience_s * (_RESTART_FACTOR if is_restarting else 1)
            if answer.may_be_done and not repeatable:
                raise answer.why
            if time.monotonic() + pause_s > deadline:
                raise answer.why
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def _tried(self, request: httpx2.Request) -> bytes | _NoAnswer:
        """Send once; return the answer, or why there is none now. Raises errors that a retry cannot fix."""
        try:
            response = self._client.send(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = "set FARM_API_CA to the file of the authority that signed it"
                raise FarmUnreachable(f"the certificate of {self.url} is not trusted: {remedy}; {error}") from error
            if "[SSL" in str(error):
                raise FarmUnreachable(f"the server at {self.url} does not support this TLS: {error}") from error
            return _NoAnswer(FarmUnreachable(f"no API of a farm answers at {self.url}: {error}"), False)
        except httpx2.TransportError as error:
            message = (
                f"the API at {self.url} did not answer ({type(error).__name__}); the request may have been executed"
            )
            return _NoAnswer(FarmUnreachable(message), True)
        if response.is_success:
            self._has_answered = True
            return response.content
        refusal = error_of(response.content)
        if refusal is None:
            message = f"the server at {self.url} is not a farm's API: status {response.status_code}"
            if response.status_code in _AWAY:
                return _NoAnswer(FarmUnreachable(message), True)
            raise FarmUnreachable(message)
        self._has_answered = True
        if isinstance(refusal, StoreUnavailable | FarmUnreachable):
            return _NoAnswer(refusal, True)
        if response.status_code == _TOO_OFTEN:
            return _NoAnswer(refusal, False)
        raise refusal

    def _read(self, kind: type[T], data: bytes) -> T:
        try:
            return serialization.read(kind, data)
        except ValueError as error:
            raise FarmUnreachable(
                f"the server at {self.url} is not a farm's API, or has another version: {error}"
            ) from error


def _trusted(url: str, authorities: str) -> ssl.SSLContext | bool:
    """Return the trusted certificate authorities: those of the PEM file, else the system's."""
    if not url.startswith("https:"):
        return False
    if not authorities:
        return True
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"{authorities} contains no certificate: {error}", field="FARM_API_CA") from None


def _content(body: Any) -> bytes:
    try:
        content = serialization.written({} if body is None else body)
    except ValueError as error:
        raise InvalidRequest(str(error), field="request") from error
    if len(content) > serialization.MAX_BODY_BYTES:
        raise InvalidRequest(serialization.TOO_LARGE, field="request")
    return content


def _sound(url: str) -> str:
    try:
        parts = urlsplit(url)
        sound = bool(parts.hostname) and (parts.port is None or parts.port > 0) and not (parts.query or parts.fragment)
    except ValueError:
        sound = False
    # a password would appear in messages, and the API expects a key
    if not sound or "@" in url:
        raise InvalidRequest("must be an address such as http://HOST:8600", field="url")
    return url.rstrip("/")


def _pauses() -> Iterator[float]:
    pause_s, longest_s = _PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause_s = min(pause_s * 2, longest_s)
