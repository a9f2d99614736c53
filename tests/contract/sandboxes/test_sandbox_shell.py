"""Traps for a persistent shell: each is a series of commands, then one more that must still work."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from workers.plugins.interfaces import Sandbox, Shell, ShellResult

Run = Callable[[Any], Any]
Check = Callable[[ShellResult], bool]

# ending an interrupted command takes up to two seconds: ^C, ^C, ^backslash, SIGKILL, each with its timeout
PATIENCE_S = 4.0
BIG = "".join(f"line {i} $HOME `x` \"q\" 'r' \\ \t tab\n" for i in range(5000))
BIG_SUM = hashlib.md5(BIG.encode()).hexdigest()


@dataclass(frozen=True)
class _Step:
    """A command, and its expected result."""

    command: str
    output: str | None = None
    code: int | None = None
    check: Check | None = None
    timeout_s: float = 5.0
    timed_out: bool | None = False
    restarted: bool | None = False


def says(command: str, output: str, code: int = 0) -> _Step:
    return _Step(command, output, code)


def ends(command: str, code: int | None = None, *, restarted: bool = False) -> _Step:
    return _Step(command, code=code, restarted=restarted)


def hangs(command: str, *, output: str | None = None, check: Check | None = None) -> _Step:
    return _Step(command, output, check=check, timeout_s=0.3, timed_out=True)


def full(result: ShellResult) -> bytes:
    assert result.full is not None
    return result.full


BINARY = "printf '\\x00\\x01\\x7f\\x1b[31m\\r\\n\\x04\\x03\\x11\\x13\\t'"

TRAPS: dict[str, list[_Step]] = {
    "echo": [says("echo hi", "hi\n")],
    "exit code": [says("(exit 7)", "", 7), says("false", "", 1)],
    "last code is carried": [says("(exit 7)", "", 7), says("echo $?", "7\n")],
    "no newline at the end": [says("printf abc", "abc")],
    "empty command": [says("", "")],
    "comment only": [says("# nothing", "")],
    "backslash at the end": [_Step("echo hi \\", check=lambda r: "hi" in r.output)],
    "ampersand at the end": [ends("sleep 0.1 &", 0)],
    "loop over lines": [says("for i in 1 2 3; do\n  echo $i\ndone", "1\n2\n3\n")],
    "heredoc with everything": [
        says("cat <<'EOF'\n\ta\t$b `c` \"d\" 'e' !! \\\nEOF", "\ta\t$b `c` \"d\" 'e' !! \\\n"),
    ],
    "history characters": [says('echo "hi!there" !!', "hi!there !!\n")],
    "quotes of all kinds": [
        says(
            """echo 'a"b' "c'd" $'e\\'f\\x41' $"g" "`echo \\`echo h\\``" "$(echo "i$(echo 'j"k')")" \\"l\\'""",
            """a"b c'd e'fA g h ij"k "l'\n""",
        ),
    ],
    "1 MB in a line": [says("echo " + "y" * 1_000_000 + " | wc -c", "1000001\n")],
    "1 MB in a line, out": [
        _Step("head -c 1000000 /dev/zero | tr '\\0' z", check=lambda r: r.full == b"z" * 1_000_000, code=0),
    ],
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
        _Step("seq 100000", check=lambda r: r.output.startswith("1\n2\n") and r.output.endswith("\n100000\n")),
    ],
    "10 MB are bounded and counted, 4 MB of them kept": [
        _Step(
            "head -c 10000000 /dev/zero | tr '\\0' b; echo END",
            timeout_s=60,
            check=lambda r: (
                len(r.output) < 300_000
                and len(r.output) + r.n_dropped == 10_000_004 + len("\n[... 9800004 bytes left out ...]\n")
                and full(r).startswith(b"b" * 2_000_000 + b"\n[... 6000004 bytes left out ...]\nb")
                and full(r).endswith(b"bEND\n")
            ),
        ),
    ],
    "no UTF-8": [says("printf 'a\\xffb\\xc3'", "a\ufffdb\ufffd")],
    "UTF-8 in two writes": [says("printf '\\xc3'; sleep 0.1; printf '\\xa9'", "é")],
    "binary is exact": [says(BINARY, "\x00\x01\x7f\x1b[31m\r\n\x04\x03\x11\x13\t")],
    "background holds the terminal": [ends("sleep 31 &", 0)],
    "background writes later": [
        ends("(sleep 0.1; echo late) &", 0),
        _Step("wait; echo x", check=lambda r: "late\n" in r.output and r.output.endswith("x\n")),
    ],
    "daemon": [says("(setsid sleep 32 >/dev/null 2>&1 </dev/null &); echo d", "d\n")],
    "background reads the terminal": [ends("cat </dev/tty & sleep 0.1", 0), says("echo x", "x\n")],
    "background goes on for ever": [
        ends("yes &", 0),
        _Step("kill %1; wait; echo over", check=lambda r: "over" in r.output),
    ],
    "a coprocess": [
        _Step(
            "coproc cat; echo x >&${COPROC[1]}; read -u ${COPROC[0]} y; echo $y; kill $COPROC_PID",
            code=0,
            check=lambda r: r.output.endswith("x\n"),
        )
    ],
    "process substitution": [says("cat <(echo a); echo b > >(cat); wait", "a\nb\n")],
    "a question to the terminal itself": [hangs("read x </dev/tty; echo no", output="")],
    "a secret asked of the terminal": [hangs("python3 -c 'import getpass; getpass.getpass()'")],
    "cat has no input": [says("cat", "")],
    "input() has no input": [
        _Step("python3 -c 'input()'", code=1, check=lambda r: "EOFError" in r.output),
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
    "time limit, all ignored in a substitution": [
        ends("X=5", 0),
        hangs("y=$(python3 -c 'import signal,time\nfor s in (2,3,15): signal.signal(s,1)\ntime.sleep(100)')"),
        says("echo $X", "5\n"),
    ],
    "time limit, one after the other ignores all": [
        ends("X=5", 0),
        hangs(
            "for i in 1 2 3 4; do\n"
            "python3 -c 'import signal,time\nfor s in (2,3,15): signal.signal(s,1)\ntime.sleep(100)'; done"
        ),
        says("echo $X", "5\n"),
    ],
    "time limit, all ignored by the shell": [
        ends("cd /usr", 0),
        _Step("trap '' INT QUIT TERM; while :; do :; done", timeout_s=0.3, timed_out=True, restarted=True),
        says("pwd", "/usr\n"),
    ],
    "time limit of a command on a terminal set raw": [
        ends("X=5", 0),
        hangs("stty raw -isig </dev/tty; sleep 100"),
        says("echo $X", "5\n"),
    ],
    "time limit of a stopped shell": [ends("X=5", 0), hangs("kill -STOP $$; sleep 100"), says("echo $X", "5\n")],
    "suspend": [ends("X=5", 0), hangs("suspend; sleep 100"), says("echo $X", "5\n")],
    "no time at all": [
        _Step("sleep 100", timeout_s=0.0, timed_out=True, check=lambda r: r.code is None),
        says("echo $((20 + 3))", "23\n"),
    ],
    "time limit, INT trapped by the shell": [hangs("trap 'echo GOT' INT; sleep 100", output=None)],
    "time limit gives what was written": [hangs("echo part; sleep 100", output="part\n")],
    "endless output": [hangs("yes", check=lambda r: len(r.output) < 300_000 and r.output.startswith("y\ny\n"))],
    "exit keeps directory and exports": [
        _Step("cd /usr; export A_B='1 2'; exit 3", code=3, restarted=True),
        says('echo $PWD "$A_B"', "/usr 1 2\n"),
    ],
    "set -e": [_Step("set -e; false; echo no", code=1, restarted=True, check=lambda r: "no\n" not in r.output)],
    "set -e and codes that are not 0": [
        ends("set -e; if false; then :; fi; false || true", 0),
        says("! true; echo on", "on\n"),
        _Step("! true", code=1, restarted=True),
    ],
    "set -u": [_Step("set -u; echo $undefined_zz; echo no", check=lambda r: "\nno" not in r.output, code=1)],
    "set -x": [_Step("set -x; echo a; set +x", code=0, check=lambda r: "a\n" in r.output)],
    "exec": [ends("cd /usr", 0), ends("exec ls -d /", 0, restarted=True), says("echo $PWD", "/usr\n")],
    "prompts changed": [
        ends("PS1='>>> '; PS2='... '; PS0='zz'; PROMPT_COMMAND='echo JUNK'", 0),
        says("echo ok", "ok\n"),
        says("echo ok2", "ok2\n"),
    ],
    "prompts that run programs": [
        ends("PS1='$(sleep 100)'; PS2=$PS1; PS4='$(sleep 100)'", 0),
        says("echo ok", "ok\n"),
    ],
    "PROMPT_COMMAND emptied, then an abort": [
        ends("PROMPT_COMMAND=", 0),
        _Step("set -u; echo $undefined_zz", code=1, check=lambda r: "unbound" in r.output),
    ],
    "traps of all kinds": [
        ends("trap 'echo D' DEBUG; trap 'echo E' ERR; trap 'echo R' RETURN; trap 'echo C' CHLD; set -ET", 0),
        _Step("ls /none; echo x", check=lambda r: "x\n" in r.output, code=0),
        ends("trap - DEBUG ERR RETURN CHLD", 0),
    ],
    "functions and aliases of the protocol's words": [
        ends("read() { :; }; eval() { :; }; printf() { :; }; local() { :; }; return() { :; }; cd() { :; }", 0),
        ends("alias eval=false read=false builtin=false IFS=false", 0),
        says("echo fine", "fine\n"),
    ],
    "odd separators": [
        ends("IFS=0123456789; x=1", 0),
        says('echo "$((40 + 2))"', "42\n"),
        ends("unset IFS; (exit 12)", 12),
    ],
    "PATH gone": [ends("unset PATH HOME; cd /", 0), says("echo fine", "fine\n")],
    "job control off": [ends("set +m", 0), hangs("sleep 100"), says("echo fine", "fine\n")],
    "open quote": [_Step('echo "abc', check=lambda r: r.code not in (0, None))],
    "open heredoc": [_Step("cat <<EOF\nabc", check=lambda r: "abc" in r.output)],
    "syntax error": [_Step("if then", check=lambda r: r.code not in (0, None))],
    "kill -9 of itself": [ends("cd /usr", 0), ends("kill -9 $$", 137, restarted=True), says("pwd", "/usr\n")],
    "kill -9 of everything": [
        ends("sleep 100 & kill -9 -1"),
        _Step("wait; jobs -r", check=lambda r: "Running" not in r.output),
    ],
    "a fork bomb": [
        _Step(
            "f() { f | f & }; f; sleep 100",
            timeout_s=0.5,
            check=lambda r: r.timed_out or r.restarted,
            timed_out=None,
            restarted=None,
        ),
        _Step("kill -9 -1", restarted=None),
    ],
    "EXIT trapped by the user": [
        _Step("trap 'echo bye' EXIT; exit 4", code=4, restarted=True, check=lambda r: "bye" in r.output),
    ],
    "1 MB exported": [
        _Step(
            "export BIG=$(head -c 100000 /dev/zero | tr '\\0' e) B2=$BIG; export B3=$BIG; exit 2",
            code=2,
            restarted=True,
        ),
        says("echo ${#BIG} ${#B3}", "100000 100000\n"),
    ],
    "vi": [hangs("vi /tmp/_v; sleep 100")],
    "less": [_Step("less /etc/passwd", check=lambda r: "root" in r.output, code=0)],
    "top": [_Step("top", check=lambda r: r.code != 0)],
    "tput": [ends("tput cols; tput clear", None)],
    "curses": [_Step("python3 -c 'import curses; curses.wrapper(lambda s: s.getch())'", check=lambda r: r.code != 0)],
    "terminal set raw": [ends("stty raw </dev/tty; echo", 0)],
    "output closed for good": [ends("exec >/dev/null", 0), says("echo visible", ""), ends("exit", restarted=True)],
    "descriptors closed for good": [ends("exec 2>&- >&-", 0), ends("exit", restarted=True)],
    "descriptor 3 is free": [says("exec 3>/tmp/_f3; echo hi >&3; exec 3>&-; cat /tmp/_f3", "hi\n")],
    "arrays are kept": [ends("declare -A m=([a]=1)", 0), says("echo ${m[a]}", "1\n")],
    "aliases are kept": [ends("alias zz='echo aliased'", 0), says("zz", "aliased\n")],
    "functions are kept": [ends("f() { echo fff; }", 0), says("f", "fff\n")],
    "extglob is kept": [
        ends("shopt -s extglob; mkdir -p /tmp/_g/a /tmp/_g/b", 0),
        says("cd /tmp/_g; echo !(a)", "b\n"),
    ],
    "return and break at the top": [ends("return 5"), ends("break")],
    "stopped job": [_Step("bash -c 'kill -STOP $$'; echo next", check=lambda r: "next" in r.output)],
    "order of output and error": [says("echo a; echo b >&2; echo c", "a\nb\nc\n")],
    "SIGPIPE is default": [says("yes | head -1", "y\n")],
    "options of the shell": [ends("set -u; IFS=x; set -o posix; set -C; set -f", 0), says("echo a b", "a b\n")],
    "set -eu over lines": [
        _Step("set -eu\ncd /usr\nfalse\necho no", code=1, restarted=True, check=lambda r: "no\n" not in r.output),
        says("echo $PWD", "/usr\n"),
    ],
    "the protocol's variables are not exported": [says("env | grep -c __sandbox; true", "0\n")],
    "no history": [says("history", "")],
    "all of the shell's descriptors closed": [
        _Step('for n in /proc/$$/fd/*; do eval "exec ${n##*/}>&-"; done', restarted=True),
    ],
    "all numbers taken by the user": [
        ends('for n in {3..30} {200..240}; do eval "exec $n>/tmp/_f$n"; done', 0),
        says("echo to 10 >&10; cat /tmp/_f10", "to 10\n"),
    ],
    "a limit of few open files": [_Step("ulimit -n 12", restarted=True), ends("ls /", 0)],
    "a limit of some open files": [ends("ulimit -n 250", 0), says("ulimit -n", "250\n")],
    "exec of standard input": [ends("exec </dev/zero", 0), says("head -c 4 | tr '\\0' z", "zzzz")],
    "a file's name with everything": [
        ends("mkdir -p $'/tmp/_d a\\n\\té\\'\"'; cd $'/tmp/_d a\\n\\té\\'\"'", 0),
        _Step("exit 1", code=1, restarted=True, check=lambda r: r.cwd == "/tmp/_d a\n\té'\""),
        says("pwd", "/tmp/_d a\n\té'\"\n"),
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
def test_shell_works_after_each_trap(name: str, shell: Shell, run: Run) -> None:
    for step in TRAPS[name]:
        begun = time.monotonic()
        result = run(shell.run(step.command, step.timeout_s))
        assert time.monotonic() - begun < step.timeout_s + PATIENCE_S
        assert step.timed_out in (None, result.timed_out), result
        assert step.restarted in (None, result.restarted), result
        assert step.output is None or result.output == step.output
        assert step.code is None or result.code == step.code, result
        assert step.check is None or step.check(result), result
        assert result.code is None or not step.timed_out
    after = run(shell.run("echo ok-$((1+1))", 5))
    assert (after.output, after.code) == ("ok-2\n", 0)


def test_close_ends_processes_of_the_shell(sandbox: Sandbox, run: Run) -> None:
    opened = run(sandbox.open_shell())
    run(opened.run("setsid sleep 4242 & nohup sleep 4242 & disown -a", 5))
    run(opened.close())
    run(opened.close())
    left = run(sandbox.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline"], timeout_s=5))
    assert b"sleep\x004242" not in left.stdout


def test_two_shells_are_independent(sandbox: Sandbox, run: Run) -> None:
    one, two = run(sandbox.open_shell()), run(sandbox.open_shell())
    run(one.run("X=1; cd /usr", 5))
    assert run(two.run("echo ${X-unset} $PWD", 5)).output == "unset /workspace\n"
    run(one.close())
    run(two.close())


def test_cancelled_command_does_not_affect_the_next(sandbox: Sandbox, run: Run) -> None:
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
