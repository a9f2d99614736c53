"""What a persistent shell must stand: each trap is commands in turn, then one more that must still work."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from workers.interfaces import Sandbox, Shell, ShellResult

Run = Callable[[Any], Any]
Check = Callable[[ShellResult], bool]

# what ends an interrupted command takes up to two seconds: ^C, ^C, ^backslash, SIGKILL, each with its patience
PATIENCE_S = 4.0
BIG = "".join(f"line {i} $HOME `x` \"q\" 'r' \\ \t tab\n" for i in range(5000))
BIG_SUM = hashlib.md5(BIG.encode()).hexdigest()


@dataclass(frozen=True)
class Step:
    """A command, and what must come of it."""

    command: str
    output: str | None = None
    code: int | None = None
    check: Check | None = None
    timeout_s: float = 5.0
    timed_out: bool = False
    restarted: bool = False


def says(command: str, output: str, code: int = 0) -> Step:
    return Step(command, output, code)


def ends(command: str, code: int | None = None, *, restarted: bool = False) -> Step:
    return Step(command, code=code, restarted=restarted)


def hangs(command: str, *, output: str | None = None, check: Check | None = None) -> Step:
    return Step(command, output, check=check, timeout_s=0.3, timed_out=True)


BINARY = "printf '\\x00\\x01\\x7f\\x1b[31m\\r\\n\\x04\\x03\\x11\\x13\\t'"

TRAPS: dict[str, list[Step]] = {
    "echo": [says("echo hi", "hi\n")],
    "exit code": [says("(exit 7)", "", 7), says("false", "", 1)],
    "last code is carried": [says("(exit 7)", "", 7), says("echo $?", "7\n")],
    "no newline at the end": [says("printf abc", "abc")],
    "empty command": [says("", "")],
    "comment only": [says("# nothing", "")],
    "backslash at the end": [Step("echo hi \\", check=lambda r: "hi" in r.output)],
    "ampersand at the end": [ends("sleep 0.1 &", 0)],
    "loop over lines": [says("for i in 1 2 3; do\n  echo $i\ndone", "1\n2\n3\n")],
    "heredoc with everything": [
        says("cat <<'EOF'\n\ta\t$b `c` \"d\" 'e' !! \\\nEOF", "\ta\t$b `c` \"d\" 'e' !! \\\n"),
    ],
    "history characters": [says('echo "hi!there" !!', "hi!there !!\n")],
    "10 kB in a line": [says("echo " + "x" * 10_000, "x" * 10_000 + "\n")],
    "200 kB of heredoc": [says(f"cat > /tmp/_big <<'EOF'\n{BIG}EOF\nmd5sum < /tmp/_big", f"{BIG_SUM}  -\n")],
    "control characters": [
        says("printf '%s' 'a\x03b\x04c\x15d\x1ae\x7f' | od -An -c | tr -d ' \\n'", "a003b004c025d032e177"),
    ],
    "bracketed paste": [
        says("printf %s $'\x1b[200~x\x1b[201~' | od -An -tx1 | tr -d ' \\n'", "1b5b3230307e781b5b3230317e"),
    ],
    "UTF-8": [says("printf 'é%.0s' $(seq 50000)", "é" * 50_000)],
    "100 thousand lines": [
        Step("seq 100000", check=lambda r: r.output.startswith("1\n2\n") and r.output.endswith("\n100000\n")),
    ],
    "100 MB are bounded and counted": [
        Step(
            "head -c 100000000 /dev/zero | tr '\\0' a; echo END",
            timeout_s=60,
            check=lambda r: r.output.endswith("aEND\n") and len(r.output) < 300_000 and r.n_dropped > 99_000_000,
        ),
    ],
    "binary is exact": [says(BINARY, "\x00\x01\x7f\x1b[31m\r\n\x04\x03\x11\x13\t")],
    "background holds the terminal": [ends("sleep 31 &", 0)],
    "background writes later": [
        ends("(sleep 0.1; echo late) &", 0),
        Step("wait; echo x", check=lambda r: "late\n" in r.output and r.output.endswith("x\n")),
    ],
    "daemon": [says("(setsid sleep 32 >/dev/null 2>&1 </dev/null &); echo d", "d\n")],
    "cat has no input": [says("cat", "")],
    "input() has no input": [
        Step("python3 -c 'input()'", code=1, check=lambda r: "EOFError" in r.output),
    ],
    "read has no input": [says('read x; echo "[$x]"', "[]\n")],
    "python alone": [says("python3", "")],
    "bash alone": [says("bash", ""), ends("echo $SHLVL", 0)],
    "time limit keeps state": [
        ends("X=5; cd /usr", 0),
        hangs("sleep 100; echo after", check=lambda r: "after" not in r.output),
        says("echo $X $PWD", "5 /usr\n"),
    ],
    "time limit of a loop": [ends("X=5", 0), hangs("while true; do sleep 0.1; done"), says("echo $X", "5\n")],
    "time limit of a loop of builtins": [ends("X=5", 0), hangs("while :; do :; done"), says("echo $X", "5\n")],
    "time limit, INT ignored": [
        ends("X=5", 0),
        hangs("bash -c 'trap \"\" INT; sleep 100; sleep 100'"),
        says("echo $X", "5\n"),
    ],
    "time limit, INT, QUIT and TERM ignored": [
        ends("X=5", 0),
        hangs("python3 -c 'import signal,time\nfor s in (2,3,15): signal.signal(s,1)\ntime.sleep(100)'"),
        says("echo $X", "5\n"),
    ],
    "time limit, INT trapped by the shell": [hangs("trap 'echo GOT' INT; sleep 100", output=None)],
    "time limit gives what was written": [hangs("echo part; sleep 100", output="part\n")],
    "endless output": [hangs("yes", check=lambda r: len(r.output) < 300_000 and r.output.startswith("y\ny\n"))],
    "exit keeps directory and exports": [
        Step("cd /usr; export A_B='1 2'; exit 3", code=3, restarted=True),
        says('echo $PWD "$A_B"', "/usr 1 2\n"),
    ],
    "set -e": [Step("set -e; false; echo no", code=1, restarted=True, check=lambda r: "no\n" not in r.output)],
    "set -u": [Step("set -u; echo $undefined_zz; echo no", check=lambda r: "\nno" not in r.output, code=1)],
    "set -x": [Step("set -x; echo a; set +x", code=0, check=lambda r: "a\n" in r.output)],
    "exec": [ends("cd /usr", 0), ends("exec ls -d /", 0, restarted=True), says("echo $PWD", "/usr\n")],
    "prompts changed": [
        ends("PS1='>>> '; PS2='... '; PS0='zz'; PROMPT_COMMAND='echo JUNK'", 0),
        says("echo ok", "ok\n"),
        says("echo ok2", "ok2\n"),
    ],
    "open quote": [Step('echo "abc', check=lambda r: r.code not in (0, None))],
    "open heredoc": [Step("cat <<EOF\nabc", check=lambda r: "abc" in r.output)],
    "syntax error": [Step("if then", check=lambda r: r.code not in (0, None))],
    "kill -9 of itself": [ends("cd /usr", 0), ends("kill -9 $$", 137, restarted=True), says("pwd", "/usr\n")],
    "EXIT trapped by the user": [
        Step("trap 'echo bye' EXIT; exit 4", code=4, restarted=True, check=lambda r: "bye" in r.output),
    ],
    "terminal set raw": [ends("stty raw </dev/tty; echo", 0)],
    "output closed for good": [ends("exec >/dev/null", 0), says("echo visible", "visible\n")],
    "descriptors closed for good": [ends("exec 2>&- >&-", 0)],
    "descriptor 3 is free": [says("exec 3>/tmp/_f3; echo hi >&3; exec 3>&-; cat /tmp/_f3", "hi\n")],
    "arrays are kept": [ends("declare -A m=([a]=1)", 0), says("echo ${m[a]}", "1\n")],
    "aliases are kept": [ends("alias zz='echo aliased'", 0), says("zz", "aliased\n")],
    "functions are kept": [ends("f() { echo fff; }", 0), says("f", "fff\n")],
    "extglob is kept": [
        ends("shopt -s extglob; mkdir -p /tmp/_g/a /tmp/_g/b", 0),
        says("cd /tmp/_g; echo !(a)", "b\n"),
    ],
    "return and break at the top": [ends("return 5"), ends("break")],
    "stopped job": [Step("bash -c 'kill -STOP $$'; echo next", check=lambda r: "next" in r.output)],
    "order of output and error": [says("echo a; echo b >&2; echo c", "a\nb\nc\n")],
    "SIGPIPE is default": [says("yes | head -1", "y\n")],
    "options of the shell": [ends("set -u; IFS=x; set -o posix; set -C; set -f", 0), says("echo a b", "a b\n")],
    "set -eu over lines": [
        Step("set -eu\ncd /usr\nfalse\necho no", code=1, restarted=True, check=lambda r: "no\n" not in r.output),
        says("echo $PWD", "/usr\n"),
    ],
    "the protocol's variables are not exported": [says("env | grep -c __sandbox; true", "0\n")],
    "no history": [says("history", "")],
    "descriptors of the protocol closed": [
        Step(
            'for n in /proc/$$/fd/2??; do eval "exec ${n##*/}>&-"; done', timeout_s=0.3, restarted=True, timed_out=True
        )
    ],
    "directory removed": [ends("mkdir /tmp/_gone; cd /tmp/_gone; rmdir /tmp/_gone", 0), ends("ls", 0)],
    "NUL in the command": [says("echo a\0b", "a\n")],
}


@pytest.fixture
def shell(sandbox: Sandbox, run: Run) -> Iterator[Shell]:
    opened = run(sandbox.open_shell())
    yield opened
    run(opened.close())


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str, shell: Shell, run: Run) -> None:
    for step in TRAPS[name]:
        begun = time.monotonic()
        result = run(shell.run(step.command, step.timeout_s))
        assert time.monotonic() - begun < step.timeout_s + PATIENCE_S
        assert (result.timed_out, result.restarted) == (step.timed_out, step.restarted), result
        assert step.output is None or result.output == step.output
        assert step.code is None or result.code == step.code, result
        assert step.check is None or step.check(result), result
        assert result.code is None or not step.timed_out
    after = run(shell.run("echo ok-$((1+1))", 5))
    assert (after.output, after.code) == ("ok-2\n", 0)


def test_closing_ends_what_the_shell_left(sandbox: Sandbox, run: Run) -> None:
    opened = run(sandbox.open_shell())
    run(opened.run("setsid sleep 4242 & nohup sleep 4242 & disown -a", 5))
    run(opened.close())
    run(opened.close())
    left = run(sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline"], timeout_s=5))
    assert b"sleep\x004242" not in left.stdout


def test_two_shells_are_apart(sandbox: Sandbox, run: Run) -> None:
    one, two = run(sandbox.open_shell()), run(sandbox.open_shell())
    run(one.run("X=1; cd /usr", 5))
    assert run(two.run("echo ${X-unset} $PWD", 5)).output == "unset /workspace\n"
    run(one.close())
    run(two.close())


def test_a_cancelled_command_does_not_spoil_the_next(sandbox: Sandbox, run: Run) -> None:
    import asyncio

    async def cancelled() -> ShellResult:
        shell = await sandbox.open_shell()
        await shell.run("cd /usr", 5)
        running = asyncio.create_task(shell.run("echo spoiled; sleep 100", 100))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        result = await shell.run("pwd", 5)
        await shell.close()
        return result

    result = run(cancelled())
    assert (result.output, result.restarted) == ("/usr\n", True)
