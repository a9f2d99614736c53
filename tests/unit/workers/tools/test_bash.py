"""The `bash` tool's handling of its arguments and of a shell's output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farm.errors import ToolError
from workers.plugins.interfaces import Artefact, Observation, Shell, ShellResult
from workers.testing import FakeSandbox
from workers.tools.bash import BashArguments, BashTool


class _Scripted:
    """A shell that returns results in order, and keeps its requests."""

    def __init__(self, *results: ShellResult) -> None:
        self._results = iter(results)
        self.requests: list[tuple[Any, ...]] = []

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        self.requests.append((command, timeout_s, interactive))
        return next(self._results)

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        self.requests.append((keys, wait_s))
        return next(self._results)

    async def close(self) -> None:
        """Nothing to close."""


class SandboxWith(FakeSandbox):
    """A sandbox with a given shell."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell = shell

    async def open_shell(self) -> Shell:
        return self._shell


def running(output: str = "") -> ShellResult:
    return ShellResult(None, output, "/", running=True)


def run_calls(shell: _Scripted, *calls: dict[str, Any]) -> list[Observation]:
    tool = BashTool(SandboxWith(shell))

    async def all_of_them() -> list[Observation]:
        return [await tool.call(BashArguments(**call), 60.0) for call in calls]

    return asyncio.run(all_of_them())


def refused(**arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        run_calls(_Scripted(), arguments)
    return str(caught.value)


def test_contradictory_arguments_are_refused_with_a_remedy() -> None:
    assert "Give either `command` or `input`, not both" in refused(command="ls", input="x")
    assert "Give a `command` to run, or `input`" in refused()
    assert "Give a `command` to run, or `input`" in refused(command="", interactive=True)
    assert "`wait_s` goes with `interactive` or `input` only" in refused(command="ls", wait_s=20)
    assert "start one with `command` and `interactive: true`" in refused(input="x")


def test_default_arguments_change_nothing() -> None:
    shell = _Scripted(ShellResult(0, "a\n", "/"))
    call = {"command": "echo a", "interactive": False, "input": "", "enter": True, "wait_s": 5}
    assert run_calls(shell, call) == [Observation("a")]
    assert shell.requests == [("echo a", 60.0, False)]


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ({"input": "yes"}, b"yes\r"),
        ({"input": "yes", "enter": False}, b"yes"),
        ({"input": "a\nb"}, b"a\rb\r"),
        ({"input": "a\n", "enter": False}, b"a\r"),
        ({"input": "é"}, "é\r".encode()),
        ({"input": ""}, b""),
        ({"input": "C-c"}, b"\x03"),
        ({"input": "c-D"}, b"\x04"),
        ({"input": "C-z"}, b"\x1a"),
        ({"input": "C-\\"}, b"\x1c"),
        ({"input": "<enter>"}, b"\r"),
        ({"input": "<Up>"}, b"\x1b[A"),
        ({"input": "<esc>", "enter": True}, b"\x1b"),
        ({"input": "C-cc"}, b"C-cc\r"),
        ({"input": "press <enter>"}, b"press <enter>\r"),
    ],
)
def test_input_is_typed(typed: dict[str, Any], keys: bytes) -> None:
    shell = _Scripted(running(), running())
    run_calls(shell, {"command": "cat", "interactive": True}, typed)
    assert shell.requests == [("cat", 5.0, True), (keys, 5.0)]


def test_wait_is_limited_by_the_time_limit_of_a_call() -> None:
    shell = _Scripted(running(), running())
    run_calls(shell, {"command": "cat", "interactive": True, "wait_s": 1000}, {"input": "", "wait_s": 0.5})
    assert shell.requests == [("cat", 60.0, True), (b"", 0.5)]


def test_running_program_and_its_end_are_reported() -> None:
    shell = _Scripted(running("? "), ShellResult(3, "bye\n", "/"), ShellResult(0, "x\n", "/"))
    result = run_calls(shell, {"command": "ask", "interactive": True}, {"input": "y"}, {"command": "echo x"})
    assert [each.text for each in result] == [
        "? \n[it is running; go on with `input`]",
        "bye\n[it has ended, exit code 3]",
        "x",
    ]


def test_program_ended_to_make_room_is_reported() -> None:
    shell = _Scripted(running(), running("more\n"), ShellResult(0, "x\n", "/"))
    result = run_calls(shell, {"command": "ask", "interactive": True}, {"command": "echo x"})
    assert shell.requests[1:] == [(b"", 0.0), ("echo x", 60.0, False)]
    assert result[1].text == (
        "more\n[the program that ran before is ended now; this is the output of the new command:]\nx"
    )
    shell = _Scripted(running(), ShellResult(4, "last words\n", "/"), running("? "))
    result = run_calls(shell, {"command": "ask", "interactive": True}, {"command": "ask2", "interactive": True})
    assert result[1].text == (
        "last words\n[the program that ran before had ended with exit code 4; this is the output of the new command:]\n"
        "? \n[it is running; go on with `input`]"
    )


def test_all_notes_are_shown() -> None:
    result = ShellResult(
        137, "part\n", "/tmp", restarted=True, n_dropped=7, full=b"all", limit="memory limit of 5 MB reached"
    )
    (observation,) = run_calls(_Scripted(result), {"command": "x"})
    assert observation.text == (
        "part\n[exit code 137]\n[stopped by the sandbox: memory limit of 5 MB reached]\n"
        "[the shell had ended; a new one was started in /tmp: set variables and functions again]\n"
        "[7 bytes from the middle of the output are left out]"
    )
    assert observation.artefacts == (Artefact("bash.txt", "text/plain", b"all"),)
    (late,) = run_calls(_Scripted(ShellResult(None, "", "/", timed_out=True)), {"command": "x"})
    assert late.text == "[stopped: it did not finish within 60 seconds; this is what it had written]"


def test_output_is_shown_as_in_a_terminal() -> None:
    shell = _Scripted(ShellResult(0, "\x1b[1mget\x1b[0m\n 1%\r99%\n", "/"))
    (given,) = run_calls(shell, {"command": "get"})
    assert given.text == "get\n99%"
    assert [each.data for each in given.artefacts] == [b"\x1b[1mget\x1b[0m\n 1%\r99%\n"]


def test_long_progress_bar_is_reduced_to_one_line() -> None:
    full = b"".join(b"\r%d%%" % number for number in range(100_000)) + b"\n"
    shell = _Scripted(ShellResult(0, "\r1%\n[... 1 bytes left out ...]\n\r2%", "/", n_dropped=5, full=full))
    (given,) = run_calls(shell, {"command": "get"})
    assert given.text == "99999%"
    assert given.artefacts[0].data == full


def test_alternate_screen_is_kept_from_call_to_call() -> None:
    shell = _Scripted(running("\x1b[?1049h\x1b[Hone\x1b[2Htwo"), running("\x1b[2;1HT"))
    first, second = run_calls(shell, {"command": "vi", "interactive": True}, {"input": "T"})
    assert first.text.split("\n")[-3:-1] == ["one", "two"]
    assert second.text.split("\n")[-3:-1] == ["one", "Two"]
