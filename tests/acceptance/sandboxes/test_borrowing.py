"""Borrowed sandboxes on a whole farm: over the store and over HTTP, with the API and the worker killed midway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

import farm
from farm.cli.main import main
from farm.client.farm import Farm
from farm.client.sandboxes.borrower import LentHandle
from farm.embedded.embedded_farm import Embedded
from farm.errors import Conflict, InvalidRequest, NotFound, Overloaded, SandboxEnded, ServiceError
from farm.records.lending.borrowed_sandbox import SandboxState
from farm.records.lending.sandbox_calls import OpenShellCall
from tests.services.api import KEY, RestartableApi, killable_api, shown_key
from tests.services.farms import embedded, farm_folder, processes_of, until


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Embedded, RestartableApi, RestartableApi]]:
    with (
        farm_folder() as folder,
        embedded(folder, FARM_SANDBOX="namespace") as started,
        killable_api(started.home, folder / "api.log") as first,
        killable_api(started.home, folder / "second.log") as second,
        shown_key(),
    ):
        until(lambda: first.listens() and second.listens(), "both listen")
        yield started, first, second


@pytest.fixture(scope="module")
def client(here: tuple[Embedded, RestartableApi, RestartableApi]) -> Iterator[Farm]:
    with farm.connect(here[1].url) as connected:
        yield connected


@pytest.fixture(scope="module")
def sandbox(client: Farm) -> Iterator[LentHandle]:
    with client.sandboxes.start(name="shared") as started:
        yield started


def test_shell_and_python_sessions_persist_across_calls_and_apis(
    here: tuple[Embedded, RestartableApi, RestartableApi], sandbox: LentHandle
) -> None:
    sandbox.shell("cd /tmp && x=41")
    sandbox.python("y = 41")
    with farm.connect(here[2].url) as other, farm.connect(here[0].home) as local:
        for each in (other, local):
            handle = each.sandboxes.attach("shared")
            assert handle.sandbox_id == sandbox.sandbox_id
            assert handle.shell("echo $((x + 1)) in $PWD").output == "42 in /tmp\n"
            assert "42" in handle.python("y + 1").text
    other_shell = sandbox.shell("echo ${x:-unset}", "other")
    assert other_shell.output == "unset\n"
    sandbox.close_shell("other")
    with pytest.raises(NotFound, match="no shell 'other'"):
        sandbox.close_shell("other")


def test_commands_and_file_transfers_work(sandbox: LentHandle, tmp_path: Path) -> None:
    result = sandbox.exec("sh", "-c", "cat; echo $A >&2; exit 3", stdin=b"in", env={"A": "b"})
    assert (result.code, result.stdout, result.stderr) == (3, "in", "b\n")
    assert sandbox.exec("sleep", "60", timeout_s=0.2).timed_out
    sandbox.write("/workspace/a/b", b"\x00\xff")
    assert sandbox.read("/workspace/a/b") == b"\x00\xff"
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("text")
    sandbox.upload(tmp_path / "in", "/workspace/up")
    sandbox.download("/workspace/up", tmp_path / "out")
    assert (tmp_path / "out" / "deep" / "file").read_text() == "text"
    typed = sandbox.shell("read -p 'name? ' n; echo hello $n", interactive=True, timeout_s=20)
    assert (typed.running, typed.output) == (True, "name? ")
    assert "hello me" in sandbox.keys("me\r", timeout_s=20).output


@pytest.mark.parametrize(
    ("verb", "body", "status", "kind"),
    [
        ("exec", {"argv": []}, 400, "InvalidRequest"),
        ("exec", {"argv": ["true"], "timeout_s": 1e9}, 400, "InvalidRequest"),
        ("exec", {"argv": ["true"], "stdin": "!"}, 400, "InvalidRequest"),
        ("exec", {"argv": ["true"], "more": 1}, 400, "InvalidRequest"),
        ("shell", {"keys": "x", "session": "none"}, 404, "NotFound"),
        ("shell", {"command": "true", "session": "none", "opens": False}, 404, "NotFound"),
        ("read", {"path": "/nothing"}, 400, "InvalidRequest"),
        ("read", {"path": "/dev/zero"}, 400, "InvalidRequest"),
        ("write", {"path": "/workspace/x", "data": "bm8gdGFy", "packed": True}, 400, "InvalidRequest"),
        ("tool", {"name": "klingon"}, 404, "NotFound"),
        ("tool", {"name": "search", "arguments": {"query": "x"}}, 400, "InvalidRequest"),
        ("renew", {"lease_s": 1}, 400, "InvalidRequest"),
        ("nothing", {}, 404, "NotFound"),
    ],
)
def test_invalid_calls_are_refused_with_status_and_kind(
    here: tuple[Embedded, RestartableApi, RestartableApi],
    sandbox: LentHandle,
    verb: str,
    body: dict[str, object],
    status: int,
    kind: str,
) -> None:
    url = f"{here[1].url}/v1/sandboxes/{sandbox.sandbox_id}/{verb}"
    answer = httpx2.post(url, json=body, headers={"x-api-key": KEY}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind)


def test_shell_opens_once_and_invalid_tool_arguments_return_text(client: Farm, sandbox: LentHandle) -> None:
    call = OpenShellCall(session="once")
    client.sandboxes.call("shared", call)
    with pytest.raises(Conflict, match="once"):
        client.sandboxes.call("shared", call)
    refused = sandbox.tool("bash", nonsense=1)
    assert refused.refused
    assert "nonsense" in refused.text


def test_failed_start_names_its_cause(client: Farm) -> None:
    with pytest.raises(SandboxEnded, match=r"did not start.*/nowhere\.sif"):
        client.sandboxes.start({"image": "/nowhere.sif"})
    assert [each.name for each in client.sandboxes.list()] == ["shared"]


def test_call_runs_once_when_its_api_is_killed(
    here: tuple[Embedded, RestartableApi, RestartableApi], sandbox: LentHandle
) -> None:
    _, api, _ = here
    results = []

    def count() -> None:
        with farm.connect(api.url) as connected:
            counted = connected.sandboxes.attach("shared")
            results.append(
                counted.shell("echo one >>/tmp/n; while [ ! -e /tmp/go ]; do sleep 0.05; done; wc -l </tmp/n")
            )

    counting = threading.Thread(target=count)
    counting.start()
    with farm.connect(here[2].url) as other:
        begun = other.sandboxes.attach("shared")
        until(lambda: begun.exec("cat", "/tmp/n").code == 0, "the command has begun")
        api.kill()
        api.start()
        until(api.listens, "the API listens again")
        begun.write("/tmp/go", b"")
    counting.join()
    assert [result.output for result in results] == ["1\n"]


def test_sandbox_outlives_its_worker_until_its_lease_ends(
    here: tuple[Embedded, RestartableApi, RestartableApi], client: Farm
) -> None:
    started, _, _ = here
    handle = client.sandboxes.start(lease_s=5)
    handle.shell("echo here >/tmp/kept; x=1")
    stuck: list[BaseException] = []

    def wait() -> None:
        try:
            handle.shell("touch /tmp/begun; sleep 600", "other")
        except ServiceError as error:
            stuck.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: handle.exec("cat", "/tmp/begun").code == 0, "the command has begun")
    [worker] = [each for each in processes_of(Path(started.home).parent) if "workers.queue -n run@" in each]
    os.kill(int(worker.partition(":")[0]), signal.SIGKILL)
    waiting.join()
    assert "may have been executed" in str(stuck[0])
    assert handle.read("/tmp/kept") == b"here\n"
    assert handle.shell("echo ${x:-anew}").output == "anew\n"
    until(lambda: handle.state().ended, "its lease has run out")
    with pytest.raises(SandboxEnded, match="lease ran out"):
        handle.exec("true")
    until(
        lambda: not [each for each in processes_of(Path(started.home).parent) if handle.sandbox_id in each],
        "it is gone",
    )


def test_sandbox_of_killed_client_ends_with_its_lease(
    here: tuple[Embedded, RestartableApi, RestartableApi], client: Farm
) -> None:
    code = (
        "import farm, sys, time; client = farm.connect(sys.argv[1])\n"
        "handle = client.sandboxes.start(name='of-the-dead', lease_s=5)\n"
        "handle.shell('echo begun >/tmp/begun; while [ ! -e /tmp/go ]; do sleep 0.05; done')"
    )
    with subprocess.Popen([sys.executable, "-c", code, here[1].url]) as dead:
        try:
            until(lambda: _begun(client, "of-the-dead"), "its command has begun")
        finally:
            dead.kill()
    borrowed = client.sandboxes.get("of-the-dead")
    assert not borrowed.ended, "a command that goes on is a use"
    client.sandboxes.attach("of-the-dead").write("/tmp/go", b"")
    until(lambda: client.sandboxes.get("of-the-dead").ended, "its lease has run out")
    assert "lease ran out" in client.sandboxes.get("of-the-dead").ended_why
    folder = Path(here[0].home).parent
    until(lambda: not [each for each in processes_of(folder) if borrowed.sandbox_id in each], "it is gone")


def _begun(client: Farm, name: str) -> bool:
    try:
        return client.sandboxes.attach(name).exec("test", "-e", "/tmp/begun").code == 0
    except NotFound:
        return False


def test_read_is_never_answered_from_an_earlier_call(
    here: tuple[Embedded, RestartableApi, RestartableApi], sandbox: LentHandle
) -> None:
    url = f"{here[1].url}/v1/sandboxes/{sandbox.sandbox_id}"
    for number in range(2):
        sandbox.write("/tmp/number", b"%d" % number)
        body = {"path": "/tmp/number"}
        read = httpx2.post(f"{url}/read?call_id=same", json=body, headers={"x-api-key": KEY}, timeout=60)
        assert b64decode(read.json()["data"]) == b"%d" % number
        ran = httpx2.post(
            f"{url}/exec?call_id=once", json={"argv": ["cat", "/tmp/number"]}, headers={"x-api-key": KEY}, timeout=60
        )
        assert ran.json()["stdout"] == "0", "a command is run once"


def test_interrupted_start_leaves_no_sandbox(client: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client.sandboxes, "renew", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.sandboxes.start(name="interrupted")
    assert client.sandboxes.get("interrupted").ended
    with pytest.raises(Overloaded, match="no sandbox started in 0 s"):
        client.sandboxes.start(name="no-time", wait_s=0)
    assert client.sandboxes.get("no-time").ended


def test_call_on_a_stopped_sandbox_names_the_reason(client: Farm) -> None:
    handle = client.sandboxes.start()
    assert handle.state().state is SandboxState.RUNNING
    handle.stop()
    with pytest.raises(SandboxEnded, match="it was stopped"):
        handle.exec("true")


def test_sandbox_commands_of_the_cli_work(
    here: tuple[Embedded, RestartableApi, RestartableApi], tmp_path: Path
) -> None:
    url = ["--url", here[2].url]

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["sandbox", *words, *url])
        assert result.exit_code == code, result.output
        return result.output

    name = run("start", "--name", "by-command", "--lease", "60").strip()
    assert name in run("list")
    assert run("exec", "by-command", "echo", "hi") == "hi\n"
    run("exec", "by-command", "false", code=1)
    run("shell", name, "cd /tmp; echo text >f")
    assert run("shell", name, "cat f") == "text\n"
    assert "3" in run("python", name, "1 + 2")
    for rubbish in (b"{", b"\xff\xfe"):
        (tmp_path / "spec").write_bytes(rubbish)
        assert "--spec" in run("start", "--spec", str(tmp_path / "spec"), code=1)
    (tmp_path / "a").write_text("a")
    run("put", name, str(tmp_path / "a"), "/tmp/a")
    run("get", name, "/tmp/a", str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "a"
    assert "90 s" in run("renew", name, "--lease", "90")
    run("stop", name)
    assert "it was stopped" in run("exec", name, "true", code=1)
    with pytest.raises(InvalidRequest), farm.connect(here[2].url) as connected:
        connected.sandboxes.start({"network": True})


def test_sandbox_of_killed_node_ends_with_a_reason(
    here: tuple[Embedded, RestartableApi, RestartableApi], client: Farm
) -> None:
    folder = Path(here[0].home).parent
    handle = client.sandboxes.start(name="on-a-killed-node")
    stuck: list[BaseException] = []

    def wait() -> None:
        try:
            handle.shell("echo begun >/tmp/begun; sleep 600")
        except (SandboxEnded, ServiceError) as error:
            stuck.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: _begun(client, "on-a-killed-node"), "its command has begun")
    with farm.connect(here[0].home) as local:
        [known] = local.nodes()
    os.kill(known.info["supervisor"], signal.SIGKILL)
    waiting.join()
    assert len(stuck) == 1
    until(lambda: handle.state().ended, "it has ended")
    with pytest.raises(SandboxEnded, match=r"its node .* was killed and started again|its node was lost"):
        handle.exec("true")
    assert not [each for each in processes_of(folder) if handle.sandbox_id in each]
    with client.sandboxes.start() as next_one:
        assert next_one.exec("echo", "again").stdout == "again\n"


def test_api_logs_have_no_traceback(here: tuple[Embedded, RestartableApi, RestartableApi]) -> None:
    for name in ("api.log", "second.log"):
        assert "Traceback" not in (Path(here[0].home).parent / name).read_text()
