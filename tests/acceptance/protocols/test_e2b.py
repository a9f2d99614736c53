"""E2B's protocol on a whole farm, with the API, the client and the worker killed between and during commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

import farm
from farm.client.farm import Farm
from farm.embedded.embedded_farm import Embedded
from tests.doubles.connect_client import AgentClient, StreamFailed, encoded, started, text_of
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded, farm_folder, processes_of, until

START, CONNECT = "process.Process/Start", "process.Process/Connect"
OCTETS = {"content-type": "application/octet-stream"}


class _Setting(NamedTuple):
    started: Embedded
    first: RestartableApi
    second: RestartableApi
    farm: Farm

    def rest(self, method: str, path: str, body: Any = None, api: int = 0, **headers: str) -> httpx2.Response:
        """Return the response of the REST API of one of the two."""
        url = (self.first, self.second)[api].url
        sent = {"x-api-key": KEY, **headers}
        return httpx2.request(method, f"{url}/e2b{path}", json=body, headers=sent, timeout=120)

    def created(self, **values: Any) -> str:
        """Return the id of a new sandbox."""
        answer = self.rest("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 300, **values})
        assert answer.status_code == 201, answer.text
        sandbox_json = answer.json()
        assert (sandbox_json["templateID"], sandbox_json["envdAccessToken"]) == ("base", KEY)
        return str(sandbox_json["sandboxID"])

    def agent(self, sandbox_id: str, api: int = 0) -> AgentClient:
        """Return a client for the agent of a sandbox."""
        return AgentClient(f"{(self.first, self.second)[api].url}/e2b", sandbox_id)


@pytest.fixture(scope="module")
def setting() -> Iterator[_Setting]:
    with (
        farm_folder() as folder,
        embedded(folder, FARM_SANDBOX="namespace") as begun,
        killable_api(begun.home, folder / "api.log", KEY, "--speak", "e2b") as first,
        killable_api(begun.home, folder / "second.log", KEY, "--speak", "e2b") as second,
        farm.connect(begun.home) as client,
    ):
        until(lambda: first.listens() and second.listens(), "both listen")
        yield _Setting(begun, first, second, client)


@pytest.fixture(scope="module")
def sandbox_id(setting: _Setting) -> Iterator[str]:
    created = setting.created(envVars={"GIVEN": "yes"}, metadata={"job": "1"})
    yield created
    setting.rest("DELETE", f"/sandboxes/{created}")


@pytest.fixture(scope="module")
def agent(setting: _Setting, sandbox_id: str) -> AgentClient:
    return setting.agent(sandbox_id)


def all_of(agent: AgentClient, message: dict[str, Any], verb: str = START, **headers: str) -> tuple[str, str, Any]:
    """Return the output of a process on both streams, and its end."""
    out = err = ""
    with agent.stream(verb, message, **headers) as events:
        assert next(events)["start"]["pid"] > 0
        for event in events:
            out += text_of(event)
            err += text_of(event, "stderr")
            if "end" in event:
                return out, err, event["end"]
    raise AssertionError("it has no end")


def test_commands_report_output_and_exit_status(agent: AgentClient) -> None:
    done = {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert all_of(agent, started("echo out; echo err >&2; echo $GIVEN")) == ("out\nyes\n", "err\n", done)
    failed = {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert all_of(agent, started("exit 3")) == ("", "", failed)
    assert all_of(agent, started("kill -9 $$"))[2]["exitCode"] == -1
    config = {"process": {"cmd": "env", "envs": {"A": "é"}, "cwd": "/tmp"}, "stdin": False, "tag": "tagged"}
    assert "A=é\n" in all_of(agent, config)[0]
    with pytest.raises(StreamFailed, match="deadline_exceeded"):
        all_of(agent, started("sleep 600"), **{"connect-timeout-ms": "300"})
    assert agent.message("process.Process/List", {}) == {"processes": []}


def test_process_accepts_input_watchers_and_signals(agent: AgentClient) -> None:
    with agent.stream(START, {**started("cat"), "stdin": True, "tag": "cat"}) as events:
        pid = next(events)["start"]["pid"]
        [listed] = agent.message("process.Process/List", {})["processes"]
        assert (listed["pid"], listed["tag"], listed["config"]["cmd"]) == (pid, "cat", "/bin/bash")
        selector = {"process": {"tag": "cat"}}
        agent.message("process.Process/SendInput", {**selector, "input": {"stdin": encoded("é\n".encode())}})
        assert text_of(next(events)) == "é\n"
        with agent.stream(CONNECT, {"process": {"pid": pid}}, **{"keepalive-ping-interval": "1"}) as others:
            assert next(others)["start"]["pid"] == pid
            assert "keepalive" in next(others)
            agent.message("process.Process/SendInput", {**selector, "input": {"stdin": encoded(b"more\n")}})
            assert (text_of(next(events)), text_of(next(others))) == ("more\n", "more\n")
            agent.message("process.Process/SendSignal", {**selector, "signal": "SIGNAL_SIGKILL"})
            assert next(events)["end"]["exitCode"] == next(others)["end"]["exitCode"] == -1
    for verb, more in (("SendSignal", {"signal": "SIGNAL_SIGTERM"}), ("CloseStdin", {}), ("SendInput", {})):
        assert agent.refusal(f"process.Process/{verb}", {"process": {"pid": pid}, **more}) == (404, "not_found"), verb
    with pytest.raises(StreamFailed, match="not_found"), agent.stream(CONNECT, {"process": {"pid": pid}}) as events:
        next(events)


def test_files_are_written_read_listed_and_moved(agent: AgentClient) -> None:
    data = bytes(range(256)) * 1000
    written = agent.file("POST", params={"path": "new/é"}, content=data, headers=OCTETS)
    assert written.json() == [{"name": "é", "path": "/workspace/new/é", "type": "file"}]
    assert agent.file("GET", params={"path": "/workspace/new/é"}).content == data
    several = [("file", ("/tmp/1", b"one")), ("file", ("two/2", b"two"))]
    assert [each["path"] for each in agent.file("POST", files=several).json()] == ["/tmp/1", "/workspace/two/2"]
    entry = agent.message("filesystem.Filesystem/Stat", {"path": "/tmp/1"})["entry"]
    assert (entry["type"], entry["size"], entry["permissions"]) == ("FILE_TYPE_FILE", "3", "-rw-r--r--")
    for verb, message, refused in (
        ("MakeDir", {"path": "/tmp"}, (409, "already_exists")),
        ("MakeDir", {"path": "/tmp/1"}, (400, "invalid_argument")),
        ("Stat", {"path": "/nothere"}, (404, "not_found")),
        ("ListDir", {"path": "/nothere"}, (404, "not_found")),
        ("ListDir", {"path": "/tmp/1"}, (400, "invalid_argument")),
        ("Move", {"source": "/nothere", "destination": "/x"}, (404, "not_found")),
    ):
        assert agent.refusal(f"filesystem.Filesystem/{verb}", message) == refused, message
    for path, status in (("/nothere", 404), ("/tmp", 400)):
        assert agent.file("GET", params={"path": path}).status_code == status


def test_command_survives_a_killed_api_that_streams_it(setting: _Setting, sandbox_id: str) -> None:
    agent, other = setting.agent(sandbox_id), setting.agent(sandbox_id, api=1)
    script = "echo one >>/tmp/times; echo begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; wc -l </tmp/times"
    with agent.stream(START, started(script)) as events:
        pid = next(events)["start"]["pid"]
        assert text_of(next(events)) == "begun\n"
        setting.first.kill()
        with pytest.raises((httpx2.TransportError, StreamFailed)):
            list(events)
    with other.stream(CONNECT, {"process": {"pid": pid}}) as events:
        assert next(events)["start"]["pid"] == pid
        other.file(
            "POST", params={"path": "/tmp/go"}, content=b"", headers={"content-type": "application/octet-stream"}
        )
        assert text_of(next(events)) == "1\n"
        assert next(events)["end"]["exitCode"] == 0
    setting.first.start()
    until(setting.first.listens, "the API listens again")


def test_sandbox_is_created_once_per_key_when_its_api_is_killed(setting: _Setting) -> None:
    body, key = {"templateID": "base", "timeout": 60}, {"idempotency-key": "one-sandbox"}
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(setting.rest, "POST", "/v2/sandboxes", body, 0, **key)
        until(lambda: len(setting.farm.sandboxes.list()) == 2, "it was asked for")
        setting.first.kill()
        cut.exception(60)
    made = [setting.rest("POST", "/v2/sandboxes", body, 1, **key).json()["sandboxID"] for _ in range(2)]
    setting.first.start()
    until(setting.first.listens, "the API listens again")
    assert len({*made, *(each.sandbox_id for each in setting.farm.sandboxes.list())}) == 2
    assert setting.rest("DELETE", f"/sandboxes/{made[0]}").status_code == 204
    assert setting.rest("DELETE", f"/sandboxes/{made[0]}").status_code == 404


def test_failed_create_leaves_no_sandbox(setting: _Setting) -> None:
    n_before = len(setting.farm.sandboxes.list())
    url = f"{setting.first.url}/e2b/v2/sandboxes"
    slow = {"templateID": "docker-archive:/nowhere.tar", "timeout": 60}
    answer = httpx2.post(url, json=slow, headers={"x-api-key": KEY}, timeout=120)
    assert (answer.status_code, "nowhere" in answer.json()["message"]) == (410, True)
    until(lambda: len(setting.farm.sandboxes.list()) == n_before, "none is left")


def test_sandbox_of_dead_client_ends_with_its_lease(setting: _Setting) -> None:
    left = setting.created(timeout=5)
    agent = setting.agent(left)
    with agent.stream(START, started("sleep 600")) as events:
        next(events)
    until(lambda: setting.farm.sandboxes.get(left).ended, "its lease has run out")
    assert agent.health() == 502
    folder = Path(setting.started.home).parent
    until(lambda: not [each for each in processes_of(folder) if left in each], "it is gone")


def test_open_stream_renews_the_lease(setting: _Setting) -> None:
    watched = setting.created(timeout=5)
    agent, began = setting.agent(watched), time.monotonic()
    assert all_of(agent, started("sleep 8; echo on"))[0] == "on\n"
    assert time.monotonic() - began > 7
    setting.rest("DELETE", f"/sandboxes/{watched}")


def test_delete_of_sandbox_ends_the_stream_of_its_command(setting: _Setting) -> None:
    killed = setting.created()
    agent = setting.agent(killed)
    with agent.stream(START, started("echo begun; sleep 600")) as events:
        next(events)
        assert text_of(next(events)) == "begun\n"
        assert setting.rest("DELETE", f"/sandboxes/{killed}").status_code == 204
        with pytest.raises(StreamFailed, match="was not found"):
            list(events)


def test_hundred_concurrent_commands_keep_their_outputs_apart(setting: _Setting, sandbox_id: str) -> None:
    second = setting.created()
    clients = [setting.agent(sandbox_id), setting.agent(second, api=1)]
    with ThreadPoolExecutor(100) as pool:
        outputs = pool.map(lambda n: all_of(clients[n % 2], started(f"echo {n}; sleep 0.1; echo {n} >&2")), range(100))
        assert [(out, err) for out, err, _ in outputs] == [(f"{n}\n", f"{n}\n") for n in range(100)]
    setting.rest("DELETE", f"/sandboxes/{second}")


def test_api_logs_have_no_traceback(setting: _Setting) -> None:
    for name in ("api.log", "second.log"):
        assert "Traceback" not in (Path(setting.started.home).parent / name).read_text()
