"""A resource server of NeMo Gym, as its clients see one: the package itself needs a newer Python.

Its routes and bodies are those of nemo-gym 0.4.0: `/seed_session`, a route for each tool and `/verify`; or `/reset` and
`/step` of its gymnasium servers. It is strict where NeMo Gym is: a Responses object with its fields, and a session
cookie.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESPONSE_FIELDS = {"id", "created_at", "model", "object", "output", "parallel_tool_calls", "tool_choice", "tools"}


class ResourceServer(BaseHTTPRequestHandler):
    """A weather server, and a game of two steps."""

    sessions: dict[str, int] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = (self.headers["cookie"] or "").removeprefix("session=")
        reply = self._answer(self.path, body, session)
        data = json.dumps(reply).encode()
        self.send_response(200 if reply is not None else 422)
        if not session:
            name = f"s{len(self.sessions)}"
            self.sessions[name] = 0
            self.send_header("set-cookie", f"session={name}; Path=/; HttpOnly")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, path: str, body: dict[str, Any], session: str) -> Any:
        if path == "/seed_session":
            return {}
        if path == "/reset":
            return {"observation": "Say a word.", "info": {}}
        if not session:
            return None
        if path == "/get_weather":
            return {"weather": "cold", "city": body["city"]}
        response = body.get("response", {})
        if set(response) != RESPONSE_FIELDS:
            return None
        texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        if path == "/verify":
            called = [item["type"] for item in response["output"]]
            right = body["expected"] in texts[-1] and called[:2] == ["function_call", "function_call_output"]
            return {**body, "reward": float(right)}
        self.sessions[session] += 1
        over = self.sessions[session] == 2
        return {"observation": None if over else "More.", "reward": 0.5 * (texts == ["yes"]), "terminated": over}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def resource_server() -> Iterator[str]:
    """Yield the address of a running server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ResourceServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
