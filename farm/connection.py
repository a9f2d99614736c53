"""Questions over HTTP to the API of a farm, asked again while it is away.

An API holds nothing: one that was killed is as good as new when it is started again, and what it was asked is asked
again. Only of what must not be done twice, a question that was sent and not answered is an error at once.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from farm import wire
from farm.errors import FarmUnreachable, InvalidRequest, ServiceError, StoreUnavailable
from farm.problems import error_of

T = TypeVar("T")

PATIENCE_S = 30.0
"""As long as with a database."""
_CONNECT_S = 10.0
_ANSWER_S = 300.0
"""Beyond what a question may wait: a huge batch takes its time."""
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0)
# a machine that died without a word would be waited for just as long
_TCP = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
_PAUSE_S = (0.05, 1.0)
_AWAY = {502, 503, 504}
"""What something in between answers when the API is away."""


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Why a question was not answered; `may_be_done`: it may have arrived all the same."""

    why: ServiceError
    may_be_done: bool


class Connection:
    """To one address, for any number of threads. `patience_s` is how long an API that is away is waited for.

    Raises InvalidRequest for an address that is none.
    """

    def __init__(self, url: str, key: str = "", patience_s: float = PATIENCE_S) -> None:
        self.url = _sound(url)
        self._patience_s = patience_s
        shown = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._client = httpx2.Client(
            # the environment's proxies are for what is far away, and reading certificates takes longer than a question
            trust_env=False,
            transport=httpx2.HTTPTransport(
                verify=url.startswith("https:"), limits=_LIMITS, socket_options=_TCP, trust_env=False
            ),
            headers=[*shown, (b"accept-encoding", b"identity")],
        )

    def get(self, kind: type[T], path: str, *, wait_s: float = 0.0, **query: Any) -> T:
        """The answer to a question that changes nothing. `wait_s` is what it may be waited for."""
        asked = {name: str(value) for name, value in query.items()}
        if wait_s:
            asked["wait_s"] = f"{wait_s:.3f}"
        return self._read(kind, self._ask("GET", path, asked, None, wait_s))

    def data(self, path: str, **query: str) -> bytes:
        """As `get`, of what is no JSON."""
        return self._ask("GET", path, query, None)

    def post(self, kind: type[T], path: str, body: Any = None, *, repeatable: bool = True) -> T:
        """Have something done. What is not `repeatable` is not sent again once it may have arrived."""
        return self._read(kind, self._ask("POST", path, {}, _content(body), repeatable=repeatable))

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
    ) -> bytes:
        # what makes a question one that cannot be sent is the caller's, and no reason to try again
        try:
            request = self._client.build_request(
                method,
                self.url + path,
                params=query,
                content=content,
                headers={"content-type": "application/json"} if content is not None else {},
                timeout=httpx2.Timeout(_ANSWER_S + wait_s, connect=_CONNECT_S, pool=None),
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise InvalidRequest(f"cannot be sent: {error}", field="request") from error
        deadline = None
        for pause_s in _pauses():
            answer = self._tried(request)
            if isinstance(answer, bytes):
                return answer
            deadline = time.monotonic() + self._patience_s if deadline is None else deadline
            if answer.may_be_done and not repeatable:
                raise answer.why
            if time.monotonic() + pause_s > deadline:
                raise answer.why
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def _tried(self, request: httpx2.Request) -> bytes | _NoAnswer:
        """The answer, or why there is none now. Raises what will be so the next time, too."""
        try:
            response = self._client.send(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _NoAnswer(FarmUnreachable(f"no API of a farm answers at {self.url}: {error}"), False)
        except httpx2.TransportError as error:
            why = f"the API at {self.url} gave no answer ({type(error).__name__}); it may have done what it was asked"
            return _NoAnswer(FarmUnreachable(why), True)
        if response.is_success:
            return response.content
        refusal = error_of(response.content)
        if refusal is None:
            refusal = FarmUnreachable(f"what answers at {self.url} is no API of a farm: status {response.status_code}")
            if response.status_code in _AWAY:
                return _NoAnswer(refusal, True)
        if isinstance(refusal, StoreUnavailable):
            return _NoAnswer(refusal, True)
        raise refusal

    def _read(self, kind: type[T], data: bytes) -> T:
        try:
            return wire.read(kind, data)
        except ValueError as error:
            raise FarmUnreachable(f"what answers at {self.url} is no API of such a farm: {error}") from error


def _content(body: Any) -> bytes:
    try:
        content = wire.written({} if body is None else body)
    except ValueError as error:
        raise InvalidRequest(str(error), field="request") from error
    if len(content) > wire.MAX_BODY_BYTES:
        raise InvalidRequest(wire.TOO_LARGE, field="request")
    return content


def _sound(url: str) -> str:
    try:
        parts = urlsplit(url)
        sound = bool(parts.hostname) and (parts.port is None or parts.port > 0) and not (parts.query or parts.fragment)
    except ValueError:
        sound = False
    # a password would be shown in messages, and the API wants a key
    if not sound or "@" in url:
        raise InvalidRequest("it is no address such as http://HOST:8600", field="url")
    return url.rstrip("/")


def _pauses() -> Iterator[float]:
    pause_s, longest_s = _PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause_s = min(pause_s * 2, longest_s)
