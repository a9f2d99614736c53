"""A test client of the Connect protocol with JSON, like E2B's."""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.services.api import KEY

_HEAD = struct.Struct(">BI")
_END = 2


class StreamFailed(Exception):
    """The error of the last message of a stream."""

    def __init__(self, error: dict[str, str]) -> None:
        super().__init__(f"{error['code']}: {error.get('message', '')}")
        self.code = error["code"]


def framed(message: Any, flags: int = 0) -> bytes:
    """Encode a message of a stream."""
    data = json.dumps(message).encode()
    return _HEAD.pack(flags, len(data)) + data


class AgentClient:
    """Calls the agent of one sandbox, through one API."""

    def __init__(self, url: str, sandbox_id: str, **headers: str) -> None:
        self._http = httpx2.Client(
            base_url=url, headers={"x-access-token": KEY, "e2b-sandbox-id": sandbox_id, **headers}, timeout=60.0
        )

    def ask(self, verb: str, message: Any) -> httpx2.Response:
        """Return the response to a unary request."""
        # with JSON escapes, which can express what UTF-8 cannot
        headers = {"content-type": "application/json"}
        return self._http.post(f"/{verb}", content=json.dumps(message), headers=headers)

    def message(self, verb: str, message: Any) -> Any:
        """Return the message of a response."""
        response = self.ask(verb, message)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, verb: str, message: Any) -> tuple[int, str]:
        """Return the status of a refusal and its code."""
        response = self.ask(verb, message)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["code"]

    @contextmanager
    def stream(self, verb: str, message: Any, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the events of a stream as they come; StreamFailed is raised at its end."""
        sent = {"content-type": "application/connect+json", **headers}
        with self._http.stream("POST", f"/{verb}", content=framed(message), headers=sent) as response:
            if response.status_code != 200:
                response.read()
                raise StreamFailed({"code": str(response.json()["code"]), "message": response.text})
            yield _events(response)

    def file(self, method: str, **values: Any) -> httpx2.Response:
        """Return the response to a request for a file."""
        return self._http.request(method, "/files", **values)

    def health(self) -> int:
        return self._http.get("/health").status_code


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        while len(data) >= _HEAD.size and len(data) >= _HEAD.size + _HEAD.unpack_from(data)[1]:
            flags, size = _HEAD.unpack_from(data)
            message = json.loads(data[_HEAD.size : _HEAD.size + size])
            del data[: _HEAD.size + size]
            if flags & _END:
                if "error" in message:
                    raise StreamFailed(message["error"])
                return
            yield message.get("event", message)
    raise StreamFailed({"code": "cut", "message": "the stream has no end"})


def started(script: str, **values: Any) -> dict[str, Any]:
    """Return the message that starts a script, as `commands.run` sends it."""
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", script]}, "stdin": False, **values}


def text_of(event: dict[str, Any], stream: str = "stdout") -> str:
    """Return the text of a stream in an event."""
    return b64decode(event.get("data", {}).get(stream, "")).decode()


def encoded(data: bytes) -> str:
    return b64encode(data).decode()
