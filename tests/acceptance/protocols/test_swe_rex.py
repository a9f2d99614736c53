"""SWE-ReX's runtime on a whole farm: the conversations of its client, with the API killed between and during calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

import farm
from farm.client.farm import Farm
from farm.client.sandboxes.borrower import LentHandle
from farm.embedded.embedded_farm import Embedded
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded, farm_folder, processes_of, until

N_SESSIONS = 50
PROMPT = "SHELLPS1PREFIX"
ACTION: dict[str, Any] = {
    "session": "default",
    "timeout": None,
    "is_interactive_command": False,
    "is_interactive_quit": False,
    "check": "silent",
    "error_msg": "",
    "expect": [],
    "action_type": "bash",
}
INTERRUPT = {"session": "default", "timeout": 0.2, "n_retry": 3, "expect": [], "action_type": "bash_interrupt"}
PYTHON: dict[str, Any] = {"is_interactive_command": True, "expect": [">>> "], "timeout": 60}


class _Setting(NamedTuple):
    started: Embedded
    first: RestartableApi
    second: RestartableApi
    farm: Farm


class RexClient:
    """Sends requests as the package's client does."""

    def __init__(self, api: RestartableApi, reference: str) -> None:
        self.url = f"{api.url}/swe-rex/{reference}"
        # one connection per request, as in the package
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._http = httpx2.Client(headers={"x-api-key": KEY}, timeout=120, limits=limits, verify=False)

    def post(self, verb: str, body: Any = None, request_id: str = "", **form: Any) -> httpx2.Response:
        headers = {"x-request-id": request_id} if request_id else {}
        if not form and body is not None:
            headers["content-type"] = "application/json"
            form = {"content": json.dumps(body)}
        return self._http.post(f"{self.url}/{verb}", headers=headers, **form)

    def alive(self) -> Any:
        return self._http.get(f"{self.url}/is_alive").json()

    def call(self, verb: str, body: Any = None, request_id: str = "", **form: Any) -> Any:
        answer = self.post(verb, body, request_id, **form)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, verb: str, body: Any) -> tuple[str, str]:
        answer = self.post(verb, body)
        assert (answer.status_code, list(answer.json())) == (511, ["swerexception"]), answer.text
        about = answer.json()["swerexception"]
        return about["class_path"].rpartition(".")[2], about["message"]

    def run(self, command: str, request_id: str = "", **values: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("run_in_session", {**ACTION, "command": command, **values}, request_id)
        return reply

    def refused(self, command: str, **values: Any) -> tuple[str, str]:
        return self.error("run_in_session", {**ACTION, "command": command, **values})

    def interrupt(self, **values: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("run_in_session", {**INTERRUPT, **values})
        return reply

    def executed(self, command: str | list[str], **values: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.call("execute", {"command": command, "shell": isinstance(command, str), **values})
        return reply


@pytest.fixture(scope="module")
def setting() -> Iterator[_Setting]:
    with (
        farm_folder() as folder,
        embedded(folder, FARM_SANDBOX="namespace") as started,
        killable_api(started.home, folder / "api.log", KEY, "--speak", "swe-rex") as first,
        killable_api(started.home, folder / "second.log", KEY, "--speak", "swe-rex") as second,
        farm.connect(started.home) as client,
    ):
        until(lambda: first.listens() and second.listens(), "both listen")
        yield _Setting(started, first, second, client)


@pytest.fixture(scope="module")
def lent(setting: _Setting) -> Iterator[LentHandle]:
    with setting.farm.sandboxes.start(name="mine") as started:
        yield started


@pytest.fixture(scope="module")
def rex(setting: _Setting, lent: LentHandle) -> RexClient:
    client = RexClient(setting.first, "mine")
    assert client.alive() == {"is_alive": True, "message": ""}
    opened = {"startup_source": [], "session": "default", "session_type": "bash", "startup_timeout": 1.0}
    assert client.call("create_session", opened) == {"output": "", "session_type": "bash"}
    return client


_COMMANDS = [
    ("echo ''", "\n", 0),
    ("printf '  x\n\n'", "  x\n\n", 0),
    ("doesntexit", None, 127),
    ("false && true", "", 1),
    ("false || true", "", 0),
    ("", "", 0),
    ("\n\n \n", "", 0),
    ("# echo 'hello world'", "", 0),
    ("\n\n\n echo 'test1' \n  \n \n echo 'test2' \n\n\n", "test1\ntest2\n", 0),
    ("cat <<EOF\na\n\nb\nEOF", "a\n\nb\n", 0),
    ("for i in {1..3};\n do echo 'hello';\n done", "hello\n" * 3, 0),
    ("[[ $env == $env ]]", "", 0),
    ("A=(); false", "", 1),
    ("echo 'hw';A=();echo 'asdf'", "hw\nasdf\n", 0),
    ("echo é漢😀", "é漢😀\n", 0),
    ("printf '\\033[1mbold\\033[0m\\r\\n'", "bold\n", 0),
    ("printf '\\377'", "�", 0),
    ("(sleep 600) &", None, 0),
    ("sleep 600 </dev/tty >/dev/tty 2>&1 &", None, 0),
    ("cd /tmp; x=42", "", 0),
    ("echo $x in $PWD", "42 in /tmp\n", 0),
    ("exit 3", None, 3),
    ("echo $PWD", "/tmp\n", 0),
]


def test_session_commands_report_output_and_exit_code(rex: RexClient) -> None:
    for command, output, code in _COMMANDS:
        reply = rex.run(command)
        assert reply["exit_code"] == code, (command, reply)
        assert output is None or reply["output"] == output, (command, reply)
        assert (reply["expect_string"], reply["session_type"]) == (PROMPT, "bash")
        assert bool(reply["failure_reason"]) == (command == "exit 3")
    assert rex.run("false", check="ignore")["exit_code"] is None


def test_invalid_commands_raise_the_errors_of_the_client(rex: RexClient) -> None:
    kind, message = rex.refused("echo why; false", check="raise", error_msg="oh")
    assert (kind, message.startswith("oh: "), "why" in message) == ("NonZeroExitCodeError", True, True)
    for command in ("(a", "for", "a='", "touch /tmp/half\n(b"):
        assert rex.refused(command)[0] == "BashIncorrectSyntaxError", command
    about = rex.post("run_in_session", {**ACTION, "command": "(a"}).json()["swerexception"]
    assert "syntax error" in about["extra_info"]["bash_stderr"]
    assert rex.executed(["test", "-e", "/tmp/half"])["exit_code"] == 1, "what cannot be read is not begun"
    kind, message = rex.refused("echo so far; sleep 600", timeout=0.5)
    assert (kind, "0.5 seconds" in message) == ("CommandTimeoutError", True)
    assert rex.interrupt()["exit_code"] == 0
    assert rex.run("echo on")["output"] == "on\n"
    assert rex.refused("true", session="none")[0] == "SessionDoesNotExistError"
    assert rex.error("run_in_session", {**INTERRUPT, "session": "none"})[0] == "SessionDoesNotExistError"
    assert rex.error("close_session", {"session": "none"})[0] == "SessionDoesNotExistError"
    assert rex.error("create_session", {})[0] == "SessionExistsError"


def test_interactive_programs_use_the_terminal(rex: RexClient) -> None:
    begun = rex.run("python3 -q", **PYTHON)
    assert (begun["exit_code"], begun["expect_string"]) == (0, ">>> ")
    assert rex.run("print('hello world')", **PYTHON)["output"] == "hello world"
    kind, message = rex.refused("while 1: pass\n", **{**PYTHON, "timeout": 0.5})
    assert (kind, "while 1" in message) == ("CommandTimeoutError", True)
    assert "KeyboardInterrupt" in rex.interrupt(expect=[">>> "], timeout=30)["output"]
    rex.run("quit()\n", is_interactive_quit=True, check="raise", timeout=60)
    assert rex.run("echo 'hello world'")["output"] == "hello world\n"
    assert rex.refused("python3 -q", is_interactive_command=True, expect=["WONT"], timeout=0.5)[0]
    assert rex.interrupt()["expect_string"] == PROMPT, "what takes no Ctrl-C is killed"
    pager: dict[str, Any] = {"is_interactive_command": True, "timeout": 0.5}
    assert rex.refused("yes | less", **pager)[0] == "CommandTimeoutError"
    rex.interrupt()
    asks = rex.run("read -p 'name? ' n; echo I am $n", is_interactive_command=True, expect=[r"name\? "], timeout=60)
    assert (asks["output"], asks["expect_string"]) == ("", "name? ")
    assert "I am me" in rex.run("me", is_interactive_command=True, timeout=60)["output"]
    ready = rex.run("echo before; echo ready; sleep 600", expect=["ready\n"], timeout=60)
    assert (ready["output"], ready["exit_code"], ready["expect_string"]) == ("before\n", None, "ready\n")
    assert rex.run("echo on", expect=["never"])["output"] == "on\n"


def test_execute_reports_output_exit_code_and_errors(rex: RexClient) -> None:
    assert rex.executed("echo out; echo err >&2") == {"stdout": "out\n", "stderr": "err\n", "exit_code": 0}
    merged = rex.executed(["bash", "-lc", "echo out; echo err >&2"], merge_output_streams=True)
    assert merged == {"stdout": "out\nerr\n", "stderr": "", "exit_code": 0}
    missing = rex.executed(["doesntexit"], merge_output_streams=True)
    assert ("doesntexit" in missing["stdout"], missing["stderr"], missing["exit_code"]) == (True, "", 127)
    assert rex.executed(["printf", r"a\377b"])["stdout"] == "a\N{REPLACEMENT CHARACTER}b"
    assert rex.executed(["pwd"], cwd="/usr")["stdout"] == "/usr\n"
    assert rex.executed("echo $A", env={"A": "é"})["stdout"] == "é\n"
    assert rex.executed("exit 3")["exit_code"] == 3
    assert rex.executed("", check=True)["exit_code"] == 0
    for body, kind in (
        ({"command": ["sleep", "600"], "timeout": 0.1}, "CommandTimeoutError"),
        ({"command": "exit 3", "shell": True, "check": True}, "NonZeroExitCodeError"),
        ({"command": "echo a b"}, "FileNotFoundError"),
        ({"command": ["/etc"]}, "PermissionError"),
        ({"command": ["true"], "cwd": "/nothere"}, "FileNotFoundError"),
        ({"command": ["true"], "cwd": "/etc/passwd"}, "NotADirectoryError"),
        ({"command": ["true"], "env": {"a=b": "c"}}, "SwerexException"),
    ):
        assert rex.error("execute", body)[0] == kind, body


def test_files_are_read_written_and_uploaded(rex: RexClient, lent: LentHandle, tmp_path: Path) -> None:
    place = "/workspace/new/folder/f"
    assert rex.call("write_file", {"path": place, "content": "é\r\nx"}) == {}
    assert lent.read(place) == "é\r\nx".encode()
    assert rex.call("read_file", {"path": place, "encoding": None, "errors": None}) == {"content": "é\nx"}
    lent.write(place, b"\xff")
    assert rex.call("read_file", {"path": place, "encoding": "latin-1"}) == {"content": "ÿ"}
    assert rex.call("read_file", {"path": place, "errors": "replace"}) == {"content": "�"}
    for verb, body, kind in (
        ("read_file", {"path": place}, "UnicodeDecodeError"),
        ("read_file", {"path": place, "encoding": "klingon"}, "LookupError"),
        ("read_file", {"path": place, "encoding": "hex"}, "LookupError"),
        ("read_file", {"path": place, "encoding": "idna"}, "LookupError"),
        ("read_file", {"path": "nothere"}, "FileNotFoundError"),
        ("read_file", {"path": "/tmp"}, "IsADirectoryError"),
        ("read_file", {"path": "/etc/passwd/x"}, "NotADirectoryError"),
        ("read_file", {"path": "/dev/zero"}, "SwerexException"),
        ("write_file", {"path": "/tmp", "content": ""}, "IsADirectoryError"),
        ("write_file", {"path": place, "content": "\ud800"}, "UnicodeEncodeError"),
    ):
        assert rex.error(verb, body)[0] == kind, body
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "binary").write_bytes(bytes(range(256)) * 4000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    archive = Path(shutil.make_archive(str(tmp_path / "zipped"), "zip", source))
    fields = {"target_path": "/workspace/up", "unzip": "true"}
    for _ in range(2):
        with archive.open("rb") as file:
            assert rex.call("upload", data=fields, files={"file": ("z.zip", file, "application/zip")}) == {}
    assert lent.read("/workspace/up/deep/binary") == bytes(range(256)) * 4000
    assert rex.executed(["/workspace/up/run.sh"])["stdout"] == "ran\n"
    one = {"target_path": "/workspace/one/file", "unzip": "false"}
    assert rex.call("upload", data=one, files={"file": ("f", b"\0\r\n--\xff")}) == {}
    assert lent.read("/workspace/one/file") == b"\0\r\n--\xff"
    onto = rex.post("upload", data={"target_path": "/workspace/one"}, files={"file": b"x"})
    assert onto.json()["swerexception"]["class_path"] == "builtins.IsADirectoryError"


def test_large_output_is_cut_in_sessions_and_whole_in_execute(rex: RexClient) -> None:
    command = "yes 0123456789 | head -c 9999990; echo end"
    shown = rex.run(command)["output"]
    assert shown.startswith("0123456789\n")
    assert shown.endswith("end\n")
    assert "bytes left out" in shown
    assert len(rex.executed(command)["stdout"]) == 9_999_994


def test_startup_files_are_sourced_and_a_slow_start_fails(rex: RexClient, lent: LentHandle) -> None:
    lent.write("/tmp/rc", b"sourced=yes; echo hello; PS1=odd")
    lent.write("/tmp/slow", b"sleep 600")
    opened = rex.call("create_session", {"session": "s", "startup_source": ["/tmp/rc"], "startup_timeout": 60})
    assert opened["output"] == "hello\n"
    assert rex.run("echo $sourced", session="s")["output"] == "yes\n"
    rex.call("close_session", {"session": "s"})
    for _ in range(2):
        slow = {"session": "slow", "startup_source": ["/tmp/slow"], "startup_timeout": 0.1}
        assert rex.error("create_session", slow)[0] == "CommandTimeoutError"
    assert rex.refused("true", session="slow")[0] == "SessionDoesNotExistError"


def test_fifty_concurrent_sessions_share_nothing(setting: _Setting) -> None:
    with setting.farm.sandboxes.start(name="crowded"), ThreadPoolExecutor(N_SESSIONS) as pool:
        clients = [RexClient(api, "crowded") for api in (setting.first, setting.second)]

        def one(number: int) -> str:
            rex, name = clients[number % 2], f"session-{number}"
            rex.call("create_session", {"session": name})
            rex.run(f"x={number}", session=name)
            output = str(rex.run("echo $x", session=name)["output"])
            rex.call("close_session", {"session": name})
            return output

        assert list(pool.map(one, range(N_SESSIONS))) == [f"{number}\n" for number in range(N_SESSIONS)]


def test_request_runs_once_when_its_api_and_client_are_killed(
    setting: _Setting, rex: RexClient, lent: LentHandle
) -> None:
    waits = "echo one >>/tmp/n; while [ ! -e /tmp/go ]; do sleep 0.05; done; wc -l </tmp/n"
    rex.run("rm -f /tmp/go /tmp/n")
    with ThreadPoolExecutor(2) as pool:
        cut = pool.submit(rex.run, waits, "request-1")
        until(lambda: lent.exec("test", "-e", "/tmp/n").code == 0, "the command has begun")
        setting.first.kill()
        assert isinstance(cut.exception(60), httpx2.TransportError)
        # another client, at another API
        other = RexClient(setting.second, "mine")
        again = pool.submit(other.run, waits, "request-1")
        lent.write("/tmp/go", b"")
        assert again.result(60)["output"] == "1\n"
    setting.first.start()
    until(setting.first.listens, "the API listens again")
    assert rex.run(waits, "request-1") == again.result()
    assert rex.run("wc -l </tmp/n", "request-1")["output"] == "1\n", "one id for another request is not the same"
    for verb, body in (
        ("execute", {"command": "echo two >>/tmp/n; wc -l </tmp/n", "shell": True}),
        ("create_session", {"session": "once"}),
        ("close_session", {"session": "once"}),
    ):
        assert rex.call(verb, body, verb) == other.call(verb, body, verb)
    typed: dict[str, Any] = {"is_interactive_command": True, "expect": ["? "], "timeout": 60}
    command = "read -p 'more? ' x; echo $x >>/tmp/typed"
    assert rex.run(command, "q", **typed) == other.run(command, "q", **typed)
    quits: dict[str, Any] = {"is_interactive_quit": True, "timeout": 60}
    assert rex.run("yes", "t", **quits) == other.run("yes", "t", **quits)
    assert lent.read("/tmp/typed") == b"yes\n"


def test_sandbox_of_dead_client_ends_with_its_lease(setting: _Setting) -> None:
    left = setting.farm.sandboxes.start(name="left", lease_s=5)
    rex = RexClient(setting.first, "left")
    rex.call("create_session", {})
    rex.run("sleep 600 &")
    until(lambda: left.state().ended, "its lease has run out")
    assert "lease ran out" in rex.refused("true")[1]
    alive = rex.alive()
    assert (alive["is_alive"], "lease ran out" in alive["message"]) == (False, True)
    folder = Path(setting.started.home).parent
    until(lambda: not [each for each in processes_of(folder) if left.sandbox_id in each], "it is gone")


def test_close_ends_the_sandbox(setting: _Setting) -> None:
    with setting.farm.sandboxes.start(name="closed") as handle:
        rex = RexClient(setting.first, "closed")
        assert rex.call("close") == rex.call("close") == {}
        assert handle.state().finished
        assert "it was stopped" in rex.refused("true")[1]


def test_api_logs_have_no_traceback(setting: _Setting) -> None:
    for name in ("api.log", "second.log"):
        assert "Traceback" not in (Path(setting.started.home).parent / name).read_text()
