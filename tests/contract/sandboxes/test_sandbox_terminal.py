"""Promises of a persistent shell about interactive programs, and commands that attack its protocol."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farm.errors import ToolError
from tests.conftest import absent
from workers.plugins.interfaces import Sandbox, Shell, ShellResult
from workers.tools.bash import BashArguments, BashTool

Run = Callable[[Any], Any]
CTRL_C, CTRL_D, CTRL_Z = b"\x03", b"\x04", b"\x1a"
LONG_S = 20.0


class Typist:
    """A person at the shell: starts programs, types, and reads the output."""

    def __init__(self, shell: Shell, run: Run) -> None:
        self._shell = shell
        self._run = run

    def plain(self, command: str, timeout_s: float = LONG_S) -> ShellResult:
        return self._run(self._shell.run(command, timeout_s))  # type: ignore[no-any-return]

    def start(self, command: str, wait_s: float = LONG_S) -> ShellResult:
        return self._run(self._shell.run(command, wait_s, interactive=True))  # type: ignore[no-any-return]

    def type(self, keys: bytes, wait_s: float = LONG_S) -> ShellResult:
        return self._run(self._shell.send(keys, wait_s))  # type: ignore[no-any-return]

    def type_until(self, keys: bytes, text: str, wait_s: float = LONG_S) -> ShellResult:
        """Type, then wait until a text appears; return the last result, with all output."""
        deadline = time.monotonic() + wait_s
        result = self.type(keys, wait_s)
        output = result.output
        while text not in output and result.running:
            assert time.monotonic() < deadline, f"did not get {text!r}, but {output!r}"
            result = self.type(b"", 0.5)
            output += result.output
        assert text in output
        return ShellResult(result.code, output, result.cwd, running=result.running)

    def works(self) -> None:
        after = self.plain("echo ok-$((1+1))", 10)
        assert (after.output, after.code, after.restarted) == ("ok-2\n", 0, False), after


@pytest.fixture
def typist(sandbox: Sandbox, run: Run) -> Iterator[Typist]:
    opened = run(sandbox.open_shell())
    person = Typist(opened, run)
    yield person
    person.works()
    run(opened.close())


def ended(result: ShellResult, code: int) -> bool:
    return (result.running, result.code) == (False, code)


def test_interactive_program_gets_its_answer(typist: Typist) -> None:
    shell_result = typist.start("read -p 'name? ' n; echo \"hello $n\"; (exit 3)")
    assert (shell_result.running, shell_result.code, shell_result.output) == (True, None, "name? ")
    result = typist.type("Zoë\n".encode())
    assert ended(result, 3)
    assert result.output == "Zoë\nhello Zoë\n"
    assert typist.plain("echo $n").output == "Zoë\n", "it ran in the shell itself"


def test_non_interactive_command_ends_by_itself(typist: Typist) -> None:
    result = typist.start("echo a; test -t 0 && test -t 1 && test -t 2; echo $? $TERM; cd /usr")
    assert ended(result, 0)
    assert (result.output, result.cwd) == ("a\n0 dumb\n", "/usr")


def test_python_prompt_is_usable(typist: Typist) -> None:
    assert typist.start("python3 -q").output.endswith(">>> ")
    assert "42" in typist.type(b"6 * 7\n").output
    assert "2\n" in typist.type_until(b"for i in range(3):\n    print(i)\n\n", "2\n").output
    slow = typist.type_until(b"import time; time.sleep(0.5); print('aw' + 'ake')\n", "awake")
    assert slow.output.endswith(">>> ")
    assert "KeyboardInterrupt" in typist.type_until(CTRL_C, "KeyboardInterrupt").output
    left = typist.type(b"raise SystemExit(7)\n")
    assert ended(left, 7)


def test_ctrl_c_and_ctrl_d_end_programs(typist: Typist) -> None:
    assert typist.start("sleep 100", 0.3).running
    assert ended(typist.type(CTRL_C), 130)
    assert typist.start("cat").running
    assert typist.type(b"line\n").output == "line\nline\n"
    assert ended(typist.type(CTRL_D), 0)


def test_ctrl_z_stops_a_program_and_fg_resumes_it(typist: Typist) -> None:
    assert typist.start("sleep 101", 0.3).running
    stopped = typist.type(CTRL_Z)
    assert ended(stopped, 148)
    assert "Stopped" in stopped.output
    assert "sleep 101" in typist.plain("jobs").output
    assert typist.start("fg", 0.3).running
    assert ended(typist.type(CTRL_C), 130)


def test_empty_input_waits_for_more_output(typist: Typist) -> None:
    first = typist.start("echo one; sleep 1; echo two; sleep 1; echo three", 0.3)
    assert (first.running, first.output) == (True, "one\n")
    second = typist.type(b"", 1.5)
    assert (second.running, second.output) == (True, "two\n")
    third = typist.type(b"")
    assert ended(third, 0)
    assert third.output == "three\n"


def test_wait_without_output_times_out(typist: Typist) -> None:
    typist.start("cat")
    begun = time.monotonic()
    nothing = typist.type(b"", 0.3)
    assert (nothing.running, nothing.output) == (True, "")
    assert 0.25 < time.monotonic() - begun < LONG_S / 2


def test_computing_program_is_waited_for(typist: Typist) -> None:
    result = typist.start("sleep 0.7; read -p 'now? ' x")
    assert (result.running, result.output) == (True, "now? ")
    typist.type(b"\n")


def test_idle_server_is_not_waited_for(typist: Typist) -> None:
    begun = time.monotonic()
    result = typist.start("python3 -m http.server 8123", 60)
    assert result.running
    assert time.monotonic() - begun < 30
    assert ended(typist.type(CTRL_C), 0)


def test_hidden_input_is_not_shown(typist: Typist) -> None:
    shell_result = typist.start("python3 -c 'import getpass; print(len(getpass.getpass()))'")
    assert shell_result.output == "Password: "
    result = typist.type(b"secret\n")
    assert ended(result, 0)
    assert result.output.split() == ["6"]


def test_split_utf_8_character_is_joined(typist: Typist) -> None:
    program = (
        "import sys, time; w = sys.stdout.buffer; w.write(b'\\xc3'); w.flush(); time.sleep(1); w.write(b'\\xa9\\n')"
    )
    first = typist.start(f'python3 -c "{program}"', 0.5)
    rest = typist.type_until(b"", "\n")
    assert first.output + rest.output == "é\n"


def test_output_beyond_the_cap_is_kept(typist: Typist) -> None:
    result = typist.start("head -c 1000000 /dev/zero | tr '\\0' q")
    assert ended(result, 0)
    assert result.full == b"q" * 1_000_000
    assert result.n_dropped == 800_000


def test_endless_output_is_cut_and_stopped(typist: Typist) -> None:
    result = typist.start("yes", 0.5)
    assert result.running
    assert len(result.output) < 300_000
    assert len(result.full or b"") <= 4_100_000
    assert ended(typist.type(CTRL_C), 130)


def test_endless_background_output_does_not_block_the_shell(typist: Typist) -> None:
    typist.plain("yes >/dev/tty & yes=$!")
    assert typist.start("sleep 0.3; read x", 1.0).running
    assert ended(typist.type(b"\n"), 0)
    typist.start("sleep 100", 0.3)
    assert ended(typist.type(CTRL_C), 130)
    typist.plain("kill $yes; wait")


def test_long_input_is_delivered_whole(typist: Typist) -> None:
    typist.start("cat > /tmp/_typed")
    with pytest.raises(ToolError, match="lines of at most 4095 bytes"):
        typist.type(b"x" * 5000 + b"\n")
    text = b"".join(b"%05d %s\n" % (n, b"y" * 90) for n in range(3000))
    typist.type(text)
    assert ended(typist.type(CTRL_D), 0)
    assert typist.plain("md5sum < /tmp/_typed; wc -c < /tmp/_typed").output.split()[-1] == str(len(text))


def test_program_that_does_not_read_takes_limited_input(typist: Typist) -> None:
    typist.start("sleep 100", 0.3)
    with pytest.raises(ToolError, match="does not read"):
        typist.type(b"line\n" * 100_000, 1.0)
    assert ended(typist.type(CTRL_C), 130)


@pytest.mark.parametrize("typed", [b"touch /tmp/_ahead\n", b"exit\n", b"cat\n", b"\x04", b"'", b"touch /tmp/_ahead"])
def test_unread_input_is_not_run_as_a_command(typed: bytes, typist: Typist) -> None:
    typist.start("sleep 0.5", 0.2)
    assert ended(typist.type(typed * 3), 0)
    assert typist.plain("ls /tmp/_ahead 2>/dev/null; echo over").output == "over\n"


def test_input_without_a_program_is_refused(typist: Typist) -> None:
    with pytest.raises(ToolError, match="no interactive program"):
        typist.type(b"x\n")
    typist.start("true")
    with pytest.raises(ToolError, match="no interactive program"):
        typist.type(b"x\n")


@pytest.mark.parametrize(
    "command",
    [
        "sleep 100",
        "cat",
        "python3 -q",
        "bash --norc",
        "python3 -c 'import signal,time\nfor s in (2,3,15): signal.signal(s,1)\ntime.sleep(100)'",
        "while :; do cat; done",
        "stty raw -isig -echo; cat",
    ],
)
def test_plain_command_ends_the_running_program(command: str, typist: Typist) -> None:
    typist.plain("X=5; cd /usr")
    assert typist.start(command, 1.0).running
    result = typist.plain("echo $X $PWD")
    assert (result.output, result.code, result.restarted) == ("5 /usr\n", 0, False)
    with pytest.raises(ToolError):
        typist.type(b"x\n")


def test_next_interactive_command_ends_the_running_program(typist: Typist) -> None:
    typist.start("cat")
    assert typist.start("read -p 'b? ' b").output == "b? "
    assert ended(typist.type(b"1\n"), 0)


def test_shell_that_ends_during_input_is_restarted(typist: Typist) -> None:
    typist.plain("cd /usr; export A=1")
    typist.start("read x; exit 4")
    result = typist.type(b"\n")
    assert (result.running, result.code, result.restarted) == (False, 4, True)
    assert typist.plain("echo $PWD $A").output == "/usr 1\n"
    typist.start("read x; kill -9 $$")
    assert typist.type(b"\n").restarted
    typist.start("read x; exec true")
    assert typist.type(b"\n").restarted


FULL_SCREEN = {
    "vi": ("vi -u NONE /tmp/_vi", [b"i", b"hello", b"\x1b", b":wq\r"]),
    "less": ("TERM=xterm less /etc/services /etc/passwd", [b" ", b"q"]),
    "top": ("TERM=xterm top", [b"q"]),
    "curses": (
        'TERM=xterm python3 -c "import curses; curses.wrapper(lambda s: (s.addstr(1, 1, \\"press\\"), s.getch()))"',
        [b"x"],
    ),
}


@pytest.mark.parametrize("name", FULL_SCREEN)
def test_full_screen_programs_are_usable(name: str, typist: Typist) -> None:
    command, keys = FULL_SCREEN[name]
    if typist.plain(f"type {'python3' if name == 'curses' else name}").code:
        absent(f"no {name} on this machine, whose programs the `host` image has")
    result = typist.start(command)
    for key in keys:
        assert result.running, result
        result = typist.type(key, 5.0)
    deadline = time.monotonic() + LONG_S
    while result.running:
        assert time.monotonic() < deadline, result
        result = typist.type(b"", 0.5)
    assert result.code == 0
    assert name != "vi" or typist.plain("cat /tmp/_vi").output == "hello\n"
    assert "-echo" in typist.plain("stty -a </dev/tty").output.split()
    assert "echo" in typist.start("stty -a").output.split(), "the next program gets a terminal as it should be"


def test_cancelled_wait_does_not_affect_the_next(sandbox: Sandbox, run: Run) -> None:
    async def cancelled() -> list[ShellResult]:
        shell = await sandbox.open_shell()
        await shell.run("cd /usr", 5)
        await shell.run("cat", 5, interactive=True)
        waiting = asyncio.create_task(shell.send(b"", 100))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(ToolError):
            await shell.send(b"x\n", 1)
        results = [await shell.run("pwd", 5), await shell.run("read -p '? '", 5, interactive=True)]
        await shell.close()
        return results

    plain, result = run(cancelled())
    assert (plain.output, plain.restarted) == ("/usr\n", True)
    assert (result.output, result.running) == ("? ", True)


def test_many_shells_run_at_once(sandbox: Sandbox, run: Run) -> None:
    async def one(number: int) -> None:
        shell = await sandbox.open_shell()
        for turn in range(3):
            assert (await shell.run(f"echo {number}-{turn}", 60)).output == f"{number}-{turn}\n"
            shell_result = await shell.run("read -p '? ' x", 60, interactive=True)
            assert (shell_result.output, shell_result.running) == ("? ", True)
            result = await shell.send(b"%d\n" % number, 60)
            assert (result.output, result.running) == (f"{number}\n", False)
            assert (await shell.run("echo $x; sleep 100", 2.0)).output == f"{number}\n"
        await shell.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(20)))

    run(all_of_them())


def test_debugger_is_usable_through_the_bash_tool(sandbox: Sandbox, run: Run) -> None:
    tool = BashTool(sandbox)

    def call(**arguments: Any) -> str:
        return str(run(tool.call(BashArguments(**arguments), LONG_S)).text)

    call(command="printf 'def f(x):\\n    return x / 0\\nf(7)\\n' > /tmp/_bug.py; cd /tmp; export A=1")
    assert call(command="python3 -m pdb _bug.py", interactive=True).endswith(
        "(Pdb) \n[it is running; go on with `input`]"
    )
    assert "ZeroDivisionError" in call(input="c", wait_s=LONG_S)
    assert "\n7\n" in call(input="p x", wait_s=LONG_S)
    result = call(command="echo $A $PWD")
    assert result.endswith("1 /tmp")
    assert "the program that ran before" in result
    with pytest.raises(ToolError, match="No program is running"):
        call(input="p x")
    run(tool.close())


RECORDS = r"b''.join(b'%d 77 /forged\0%d r\0X5 /forged\0' % (n, n) for n in range(1, 200))"
FORGERS = {
    "by every descriptor it has": f"""
import os
for number in range(3, 1024):
    try: os.write(number, {RECORDS})
    except OSError: pass
""",
    "by the shell's descriptors, through /proc": f"""
import os
for name in os.listdir(f'/proc/{{os.getppid()}}/fd'):
    if int(name) > 2:
        try: os.write(os.open(f'/proc/{{os.getppid()}}/fd/{{name}}', os.O_RDWR | os.O_NONBLOCK), {RECORDS})
        except OSError: pass
""",
    "by the shell's descriptors, taken from it, in its name": f"""
import array, ctypes, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
shell = os.pidfd_open(os.getppid())
for number in range(3, 1024):
    taken = libc.syscall(438, shell, number, 0)
    if taken < 0: continue
    try: sock = socket.socket(fileno=taken)
    except OSError: continue
    for pid in (os.getppid(), os.getpid()):
        about = [(socket.SOL_SOCKET, 2, struct.pack('iII', pid, os.getuid(), os.getgid()))]
        try: sock.sendmsg([{RECORDS}], about)
        except OSError: pass
""",
}


@pytest.mark.parametrize("way", FORGERS)
def test_program_cannot_forge_its_end(way: str, sandbox: Sandbox, run: Run, typist: Typist) -> None:
    run(sandbox.write_file("/tmp/_forge.py", (FORGERS[way] + "print('real')\nraise SystemExit(5)\n").encode()))
    for result in (typist.plain("python3 /tmp/_forge.py"), typist.start("python3 /tmp/_forge.py")):
        # it may write to its own output, by any of its names
        assert result.output.endswith("real\n")
        assert (result.code, result.cwd) == (5, "/workspace"), result


def test_subshell_cannot_forge_the_end_of_a_command(typist: Typist) -> None:
    seen = typist.plain("ls -l /proc/$$/fd").output
    (number,) = set(re.findall(r" (\d+) -> socket:", seen))
    forge = f"for n in {{1..60}}; do printf '%d 77 /forged\\0' $n; done >&{number}"
    result = typist.plain(f"({forge}; sleep 0.2; echo real; exit 5)")
    assert (result.output, result.code) == ("real\n", 5)
    typist.plain(f"(while :; do {forge}; done) & forger=$!")
    for turn in range(20):
        result = typist.plain(f"echo {turn}; (exit {turn})")
        assert (result.output, result.code, result.cwd) == (f"{turn}\n", turn, "/workspace")
    typist.plain("kill $forger; wait")


def test_program_sees_nothing_of_the_protocol(typist: Typist) -> None:
    seen = typist.plain("ls -l /proc/self/fd").output
    assert "socket" not in seen
    assert "memfd" not in seen
    assert "__sandbox" not in typist.plain("env").output


def test_shell_code_can_only_spoil_its_own_command(typist: Typist) -> None:
    # it is the shell itself, so it can report that its command has ended; what follows is still in step
    early = typist.plain("__sandbox_done; sleep 0.3; echo late")
    assert early.code == 0
    assert typist.plain("echo next").output.endswith("next\n")
    flood = typist.plain("while :; do printf 'xxxxxxxxxxxxxxxx' >&234; done", 0.5)
    assert flood.timed_out
    typist.plain("__sandbox_busy=99; unset -f __sandbox_done __sandbox_code", 0.5)


def test_program_cannot_take_descriptors_of_the_shell(sandbox: Sandbox, run: Run, typist: Typist) -> None:
    thief = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
shell = os.pidfd_open(os.getppid())
taken = [number for number in range(1024) if libc.syscall(438, shell, number, 0) >= 0]
print(taken, errno.errorcode[ctypes.get_errno()])
"""
    run(sandbox.write_file("/tmp/_thief.py", thief.encode()))
    assert typist.plain("python3 /tmp/_thief.py").output == "[] ENOSYS\n"
