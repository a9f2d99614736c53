"""The adapter of NeMo Gym, on a server of its wire: the package itself needs a newer Python.

Its routes and bodies are those of nemo-gym 0.4.0: `/seed_session`, a route for each tool and `/verify`; or `/reset` and
`/step` of its gymnasium servers. Strict where NeMo Gym is: a Responses object with its fields, and a session cookie.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from workers.environments.adapters.nemo_gym import NemoGym
from workers.environments.environment import Action, CalledTool, Episode

ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather in Rome?"}],
        "tools": [{"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}}],
    },
    "expected": "cold",
}
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
        said = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        if path == "/verify":
            called = [item["type"] for item in response["output"]]
            right = body["expected"] in said[-1] and called[:2] == ["function_call", "function_call_output"]
            return {**body, "reward": float(right)}
        self.sessions[session] += 1
        over = self.sessions[session] == 2
        return {"observation": None if over else "More.", "reward": 0.5 * (said == ["yes"]), "terminated": over}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ResourceServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def no_model(role: str, messages: object) -> str:
    raise AssertionError("it asks no model")


def test_tools_are_called_and_the_answer_is_verified(url: str) -> None:
    environment = NemoGym(no_model)
    begin = environment.reset(Episode(kwargs={"url": url, "row": ROW}))
    assert [message["role"] for message in begin.messages] == ["system", "user"]
    assert begin.tools[0]["function"] == {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}
    step = environment.step(Action("", (CalledTool("c1", "get_weather", {"city": "Rome"}),)))
    assert step.messages[0]["tool_call_id"] == "c1"
    assert json.loads(step.messages[0]["content"]) == {"weather": "cold", "city": "Rome"}
    assert (step.reward, step.terminated) == (0.0, False)
    last = environment.step(Action("It is cold."))
    assert (last.reward, last.terminated) == (1.0, True)


def test_a_gymnasium_server_is_stepped_in_its_session(url: str) -> None:
    environment = NemoGym(no_model)
    begin = environment.reset(Episode(kwargs={"url": url, "row": ROW, "gymnasium": True}))
    assert begin.messages[-1] == {"role": "user", "content": "Say a word."}
    first, second = environment.step(Action("yes")), environment.step(Action("no"))
    assert (first.messages, first.reward, first.terminated) == ([{"role": "user", "content": "More."}], 0.5, False)
    assert (second.messages, second.reward, second.terminated) == ([], 0.0, True)


def test_a_server_that_refuses_or_is_not_there_is_an_error(url: str) -> None:
    environment = NemoGym(no_model)
    with pytest.raises(OSError, match="422"):
        environment.reset(Episode(kwargs={"url": f"{url}/nothing", "row": {**ROW, "x": 1}}))
    with pytest.raises(OSError, match="refused"):
        NemoGym(no_model).reset(Episode(kwargs={"url": "http://127.0.0.1:9", "row": ROW}))
