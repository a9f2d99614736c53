"""Promises about the persistent shell, on which an agent's bash tool relies."""

from __future__ import annotations

import asyncio

from farm.errors import ToolError
from workers.conformance.trial import PromiseTrial, promise, raises, same, until


@promise(surface=True)
async def a_shell_keeps_its_state(trial: PromiseTrial) -> None:
    """Folder, variables, functions and options of a shell persist between calls."""
    shell = await trial.shell()
    result = await shell.run("cd /usr; X='a  b'; f() { echo \"$X$1\"; }; set -o noglob", 10)
    same((result.code, result.output, result.cwd), (0, "", "/usr"), "code, output and folder of the first call")
    same((await shell.run("f *; pwd", 10)).output, "a  b*\n/usr\n", "what the second call prints")


@promise(surface=True)
async def shell_returns_code_and_output(trial: PromiseTrial) -> None:
    """A call returns the exit code of its last command, and output and errors in the order written."""
    shell = await trial.shell()
    result = await shell.run("echo a; echo b >&2\nprintf c; (exit 7)", 10)
    same((result.code, result.output), (7, "a\nb\nc"), "code and output")
    same((await shell.run("echo $?", 10)).output, "7\n", "`$?` in the next call")
    result = await shell.run("if then", 10)
    assert result.code not in (0, None), f"a syntax error gives the code {result.code}"
    assert result.output, "a syntax error is not told"


@promise(surface=True)
async def a_shell_has_no_input(trial: PromiseTrial) -> None:
    """A program that reads its input in a shell gets end of file immediately instead of waiting."""
    shell = await trial.shell()
    result = await shell.run('cat; read x; echo "[$x]"', 10)
    same((result.output, result.timed_out), ("[]\n", False), "output, and whether it timed out")


@promise(surface=True)
async def shell_survives_a_time_limit(trial: PromiseTrial) -> None:
    """At the time limit the command is ended, its output so far is returned, and the shell continues unchanged."""
    shell = await trial.shell()
    await shell.run("X=5; cd /usr", 10)
    result = await shell.run("echo part; sleep 100; echo after", 0.5)
    same((result.code, result.timed_out, result.output), (None, True, "part\n"), "code, time-out and output")
    same((await shell.run("echo $X $PWD", 10)).output, "5 /usr\n", "what is left of the shell's state")


@promise(surface=True)
async def ended_shell_is_restarted(trial: PromiseTrial) -> None:
    """After `exit` a new shell starts in the same folder with the exported variables, and the result says so."""
    shell = await trial.shell()
    result = await shell.run("cd /usr; export X=1; echo bye; exit 3", 10)
    # an interactive bash prints `exit` when it ends
    same((result.code, result.restarted, result.output[:4]), (3, True, "bye\n"), "code, restart and output")
    same((await shell.run("echo $X $PWD", 10)).output, "1 /usr\n", "what the new shell knows")
    for deadly in ("exec true", "kill -9 $$"):
        same((await shell.run(deadly, 10)).restarted, True, f"whether `{deadly}` is told to have ended the shell")
        same((await shell.run("echo fine", 10)).output, "fine\n", "what the next command prints")


@promise(surface=True)
async def long_output_of_a_shell_is_cut_in_the_middle(trial: PromiseTrial) -> None:
    """Beyond a maximum the middle of the output is left out and counted; its beginning and end are kept."""
    shell = await trial.shell()
    result = await shell.run("echo BEGIN; head -c 20000000 /dev/zero | tr '\\0' a; echo; echo END", 30)
    assert result.output.startswith("BEGIN\n"), f"the output begins with {result.output[:20]!r}"
    assert result.output.endswith("\nEND\n"), f"the output ends with {result.output[-20:]!r}"
    assert result.n_dropped > 10_000_000, f"only {result.n_dropped} of 20000000 bytes are said to be left out"
    full = result.full or b""
    assert full.startswith(b"BEGIN\naaa"), f"what is kept in full begins with {full[:20]!r}"
    assert len(full) > len(result.output), f"only {len(full)} bytes are kept in full"
    same((await shell.run("echo short", 10)).full, None, "what is kept in full of a short output")


@promise(surface=True)
async def shells_are_separate(trial: PromiseTrial) -> None:
    """Shells of one sandbox have their own state and run at the same time."""
    shells = [await trial.shell() for _ in range(5)]
    await asyncio.gather(*(shell.run(f"X={n}; cd /usr", 20) for n, shell in enumerate(shells)))
    results = await asyncio.gather(*(shell.run("sleep 0.2; echo $X", 20) for shell in shells))
    same([result.output for result in results], [f"{n}\n" for n in range(5)], "what the shells print")


@promise(surface=True)
async def shell_accepts_typed_keys(trial: PromiseTrial) -> None:
    """An interactive command takes keys, including Ctrl-C and Ctrl-D, and the result tells whether it still runs."""
    shell = await trial.shell()
    result = await shell.run("read -p 'name? ' x; echo \"hello $x\"", 10, interactive=True)
    same((result.running, result.output[-6:]), (True, "name? "), "whether it waits, and what it asks")
    result = await shell.send(b"Ann\n", 10)
    assert "hello Ann" in result.output, f"the answer should be greeted, and came to {result}"
    same((result.running, result.code), (False, 0), "whether it goes on, and its code")
    for keys, command in ((b"\x03", "sleep 100"), (b"\x04", "cat")):
        same((await shell.run(command, 1, interactive=True)).running, True, f"whether `{command}` goes on")
        same((await shell.send(keys, 10)).running, False, f"whether `{command}` goes on after {keys!r}")
    same((await shell.run("echo fine", 10)).output, "fine\n", "what the next command prints")


@promise(surface=True)
async def keys_without_a_reader_are_a_tool_error(trial: PromiseTrial) -> None:
    """Typing while no interactive command runs raises ToolError."""
    shell = await trial.shell()
    with raises(ToolError):
        await shell.send(b"x\n", 1)
    same((await shell.run("echo fine", 10)).output, "fine\n", "what the next command prints")


@promise(surface=True)
async def shell_survives_a_cancelled_command(trial: PromiseTrial) -> None:
    """After a cancelled call the shell answers the next one, without output of the cancelled one."""
    shell = await trial.shell()
    await shell.run("cd /usr", 10)
    running = asyncio.create_task(shell.run("echo spoiled; sleep 100", 100))
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    same((await shell.run("pwd", 10)).output, "/usr\n", "what the next command prints")


@promise()
async def closing_a_shell_ends_its_jobs(trial: PromiseTrial) -> None:
    """Closing a shell ends its background processes, even if they were disowned or left the session."""
    shell = await trial.shell()
    sleep = f"sleep {trial.mark}"
    await shell.run(f"{sleep} & nohup {sleep} >/dev/null 2>&1 & disown -a; setsid {sleep} >/dev/null 2>&1 &", 10)
    await trial.until_asleep(3)
    await shell.close()
    await until(lambda: not trial.sleepers(), "the jobs were gone")
    await shell.close()


@promise(surface=True)
async def shell_starts_in_the_working_folder(trial: PromiseTrial) -> None:
    """A shell starts in the working folder, with the files and the environment of commands."""
    shell = await trial.shell()
    await trial.sandbox.write_file(f"s{trial.mark}", b"written")
    same((await shell.run(f"cat s{trial.mark}; echo $GREETING", 10)).output, "writtenhello\n", "what the shell sees")
    script = "id; ulimit -a; umask"
    differing = set((await shell.run(script, 10)).output.splitlines()) ^ set((await trial.sh(script)).splitlines())
    assert not differing, f"user, limits or mask of shell and command differ: {sorted(differing)}"


@promise()
async def a_shell_is_not_lost(trial: PromiseTrial) -> None:
    """Whatever a command does to variables, functions and options, the next one works, if necessary in a new shell."""
    for command in _HOSTILE:
        shell = await trial.shell()
        result = await shell.run(command, 20)
        same(result.timed_out, False, f"whether `{command}` ran into its time limit")
        result = await shell.run("echo fine", 10)
        same((result.output, result.restarted), ("fine\n", False), f"output and restart after `{command}`")
        await shell.close()


_HOSTILE = (
    "readonly PROMPT_COMMAND",
    "readonly $(compgen -v) 2>/dev/null",
    "unset -v $(compgen -v) 2>/dev/null",
    "unset -f $(compgen -A function)",
    "builtin() { :; }; printf() { :; }; set() { :; }",
    "shopt -s extdebug; trap false DEBUG",
    "enable -n printf read eval",
)


@promise()
async def redirections_of_a_shell_persist(trial: PromiseTrial) -> None:
    """After `exec >file` commands write to that file, until the shell ends."""
    shell = await trial.shell()
    await shell.run(f"exec >s{trial.mark}", 10)
    same((await shell.run("echo kept", 10)).output, "", "what a command prints whose output goes to a file")
    same((await shell.run(f"cat s{trial.mark} >&2", 10)).output, "kept\n", "what the file holds")
    same((await shell.run("exit", 10)).restarted, True, "whether `exit` gives a new shell")
    same((await shell.run("echo back", 10)).output, "back\n", "what a new shell prints")


@promise()
async def shell_hides_its_driver(trial: PromiseTrial) -> None:
    """History, tracing, variables and `$_` of a shell reflect only the commands, and not the program that runs them."""
    for commands, output in _SHOWN.items():
        shell = await trial.shell()
        results = [await shell.run(command, 10) for command in commands]
        same(results[-1].output, output, f"what {commands} print")
        await shell.close()


_SHOWN = {
    ("set -o history", "history; fc -l"): "",
    # a command is evaluated, so bash shows it one level deeper
    ("set -x", "echo b"): "++ echo b\nb\n",
    ("echo a", 'echo "[$_]"'): "[]\n",
    ("compgen -v | grep -c __",): "0\n",
    ("trap 'echo $BASH_COMMAND' DEBUG", "echo b"): "echo b\nb\n",
    # bash's own error message, as at any prompt: once for a line
    ("readonly _", "echo b"): "b\nbash: _: readonly variable\n",
}


@promise()
async def incomplete_character_is_a_tool_error(trial: PromiseTrial) -> None:
    """A command that is not Unicode text raises ToolError, and the shell continues."""
    shell = await trial.shell()
    with raises(ToolError):
        await shell.run("echo \ud800", 10)
    same((await shell.run("echo fine", 10)).output, "fine\n", "what the next command prints")
