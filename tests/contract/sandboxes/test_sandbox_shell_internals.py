"""Commands that attack their own shell: it continues, or is replaced at once and says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farm.errors import ToolError
from workers.plugins.interfaces import Sandbox, Shell

Run = Callable[[Any], Any]

GOES_ON = {
    "PS1 is read-only": "readonly PS1=x",
    "IFS is read-only": "readonly IFS",
    "PWD is read-only": "readonly PWD",
    "all variables unset": "for v in $(compgen -v); do unset -v $v; done 2>/dev/null",
    "printf is a function": "printf() { :; }",
    "eval, exec and read are functions": "eval() { :; }; exec() { :; }; read() { :; }",
    "unset and exit are functions": "unset() { :; }; exit() { :; }",
    "words are aliases": "shopt -s expand_aliases; alias builtin=: eval=: read=: IFS=: __sandbox_done=: return=: set=:",
    "posix": "set -o posix",
    "no globs, no clobber, keywords anywhere": "set -f; set -C; set -k",
    "unset variables are errors": "set -u",
    "DEBUG trap": "trap 'echo D >/dev/null' DEBUG",
    "ERR trap": "trap 'echo E' ERR",
    "RETURN trap": "set -T; trap 'echo R >/dev/null' RETURN",
    "EXIT trap of its own": "trap - EXIT",
    "all traps ignored": "for n in {1..64}; do trap '' $n; done 2>/dev/null",
    "history": "set -o history; shopt -s histverify; HISTCONTROL=; HISTSIZE=5",
    "tracing": "set -xv",
    "prompt commands": "PROMPT_COMMAND='exit 9'",
    "an array of prompt commands": "PROMPT_COMMAND=(false 'exit 9')",
    "descriptors of the driver taken": 'for n in {229..240}; do eval "exec $n>/dev/null"; done',
    "job control off, lastpipe": "set +m; shopt -s lastpipe",
    "an error handler": "command_not_found_handle() { :; }",
    "another locale": "LC_ALL=tr_TR.UTF-8; LANG=xx",
    "the random and time variables unset": "unset RANDOM SECONDS BASHPID EPOCHSECONDS",
    "COLUMNS changes": "shopt -s checkwinsize; COLUMNS=1 LINES=1",
}
IS_REPLACED = {
    "descriptors of the driver closed": 'for n in {200..250}; do eval "exec $n>&-"; done',
    "PROMPT_COMMAND is read-only": "readonly PROMPT_COMMAND",
    "PROMPT_COMMAND is read-only and exported": "export PROMPT_COMMAND; readonly PROMPT_COMMAND",
    "PS2 is read-only": "readonly PS2",
    "PS2 is read-only and exported": "declare -rx PS2=x",
    "all is read-only": "for v in $(compgen -v); do readonly $v; done 2>/dev/null",
    "all is declared read-only": "declare -r $(compgen -v) 2>/dev/null",
    "PROMPT_COMMAND is a reference": "declare -n PROMPT_COMMAND=PS2; readonly -n PS2 2>/dev/null; readonly PS2",
    "no functions": "unset -f $(compgen -A function)",
    "builtin is a function": "builtin() { :; }",
    "set is a function": "set() { :; }",
    "the driver's function is another": "__sandbox_done() { :; }",
    "the driver's function is read-only": "readonly -f __sandbox_done; unset -f __sandbox_code; readonly PS2",
    "restricted": "set -r",
    "DEBUG trap that forbids all": "shopt -s extdebug; trap false DEBUG",
    "no builtins": "enable -n printf eval read builtin",
    "an exit": "exit 0",
    "another program": "exec true",
    "another shell": "exec bash --norc",
    "an interactive shell": "exec bash -i",
    "one command": "set -t; exit",
}


@pytest.fixture
def shell(sandbox: Sandbox, run: Run) -> Iterator[Shell]:
    opened = run(sandbox.open_shell())
    yield opened
    run(opened.close())


@pytest.mark.parametrize("name", GOES_ON)
def test_attacked_shell_continues(name: str, shell: Shell, run: Run) -> None:
    run(shell.run("kept=yes", 5))
    assert not run(shell.run(GOES_ON[name], 5)).restarted
    for _ in range(2):
        result = run(shell.run("set +xv 2>/dev/null; trap - DEBUG ERR; /bin/echo ok", 5))
        assert (result.code, result.output.splitlines()[-1:], result.restarted) == (0, ["ok"], False)


@pytest.mark.parametrize("name", IS_REPLACED)
def test_broken_shell_is_replaced_at_once(name: str, shell: Shell, run: Run) -> None:
    began = time.monotonic()
    result = run(shell.run(IS_REPLACED[name], 30))
    assert (result.restarted, result.timed_out) == (True, False), result
    assert time.monotonic() - began < 20, "before its time limit"
    for _ in range(2):
        result = run(shell.run("echo ok", 5))
        assert (result.output, result.code, result.restarted) == ("ok\n", 0, False)


@pytest.mark.parametrize(
    ("command", "then", "output"),
    [
        ("exec >/tmp/_to", "echo a; echo b >&2; cat /tmp/_to >&2", "b\na\n"),
        ("exec 2>/tmp/_to", "echo a; echo b >&2", "a\n"),
        ("exec >/tmp/_to 2>&1", "echo a; echo b >&2", ""),
        ("exec 1>&-", "echo a 2>/dev/null; echo b >&2", "b\n"),
        ("exec 2>&-", "echo a; echo b >&2", "a\n"),
        ("exec 0<&- 1>&- 2>&-", "echo a; cat", ""),
        ("exec 5>&1 >/tmp/_to", "echo a; exec >&5 5>&-; echo b", "b\n"),
        ("exec </etc/passwd", "read -r line; echo ${line%%:*}", "root\n"),
        ("echo 'exec >/tmp/_to' >/tmp/_script; . /tmp/_script", "echo a; cat /tmp/_to >&2", "a\n"),
        ("echo 'exec >/tmp/_to' >/tmp/_script; source /tmp/_script", "echo a", ""),
        ("f() { exec >/tmp/_to; }; f", "echo a", ""),
        ("(exec >/tmp/_to)", "echo a", "a\n"),
        ("exec() { :; }; exec >/tmp/_to", "echo a", "a\n"),
        ("exec 5>&1", "exec >/tmp/_to; echo a >&5; exec >&5 5>&-; echo b", "a\nb\n"),
        ("{ exec 3>&1; } >/tmp/_to", "echo a >&3; cat /tmp/_to", "a\n"),
    ],
)
def test_redirection_of_the_shell_persists(command: str, then: str, output: str, shell: Shell, run: Run) -> None:
    run(shell.run(command, 5))
    assert run(shell.run(then, 5)).output == output
    assert run(shell.run("exit", 5)).restarted
    assert run(shell.run("echo back", 5)).output == "back\n"


def test_interrupted_redirection_leaves_a_working_shell(shell: Shell, run: Run) -> None:
    assert run(shell.run("exec >/tmp/_to; sleep 100", 1)).timed_out
    result = run(shell.run("echo ok", 5))
    assert (result.output, result.restarted) == ("ok\n", False)
    run(shell.run("exec 2>/tmp/_to", 5))
    assert run(shell.run("echo a; echo b >&2", 5)).output == "a\n"


def test_shell_without_output_has_a_note(shell: Shell, run: Run) -> None:
    assert run(shell.run("true", 5)).note == ""
    assert "goes elsewhere" in run(shell.run("exec >/tmp/_to", 5)).note
    assert "goes elsewhere" in run(shell.run("echo a", 5)).note


@pytest.mark.parametrize(
    ("commands", "output"),
    [
        (["set -o history; history; fc -l"], ""),
        (["set -o history", "history; fc -l"], ""),
        (["set -x", "echo b"], "++ echo b\nb\n"),
        (["echo a", 'echo "[$_]"'], "[]\n"),
        (["false", 'echo "[$_]"'], "[]\n"),
        (["echo $BASH_COMMAND"], "echo $BASH_COMMAND\n"),
        (["caller; jobs; alias; dirs"], "/workspace\n"),
        (["compgen -v | grep -c __"], "0\n"),
        (["declare -p | grep -c '^[^=]*__'"], "0\n"),
        (["trap 'echo $BASH_COMMAND' DEBUG", "echo b"], "echo b\nb\n"),
        (["trap 'echo E' ERR", "false"], "E\n"),
        (["readonly _", "echo b"], "b\nbash: _: readonly variable\n"),
        (["set -- a b", "echo $# $@"], "2 a b\n"),
        (["(exit 7)", "echo $?"], "7\n"),
        (["ls /proc/self/fd | tail -1"], "3\n"),
        (["exec 5>&1", "ls /proc/self/fd | tail -1"], "5\n"),
    ],
)
def test_shell_shows_nothing_of_its_driver(commands: list[str], output: str, shell: Shell, run: Run) -> None:
    for command in commands:
        result = run(shell.run(command, 5))
    assert result.output == output


@pytest.mark.parametrize("command", ["echo \ud800", "\udfff", "a" * 5000 + "\ud83d"])
def test_lone_surrogate_is_refused(command: str, shell: Shell, run: Run) -> None:
    with pytest.raises(ToolError, match="surrogate"):
        run(shell.run(command, 5))
    assert run(shell.run("echo fine", 5)).output == "fine\n"
