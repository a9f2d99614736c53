"""Promises about running a command and about its result."""

from __future__ import annotations

import asyncio
import os

from farm.errors import ToolError
from workers.conformance import outside
from workers.conformance.trial import PromiseTrial, promise, raises, same, until, within

_AT_ONCE = 50


@promise(surface=True)
async def streams_and_exit_code_are_separate(trial: PromiseTrial) -> None:
    """Standard output, standard error and the exit code of a command are returned separately."""
    result = await trial.bash("echo out; echo err >&2; exit 3")
    same((result.code, result.stdout, result.stderr), (3, b"out\n", b"err\n"), "the code and the two streams")
    same((result.timed_out, result.limit), (False, ""), "a time limit or another in the result")


@promise(surface=True)
async def end_by_a_signal_is_a_failure(trial: PromiseTrial) -> None:
    """A command that a signal ended has an exit code other than 0."""
    for number in ("KILL", "SEGV", "TERM"):
        result = await trial.bash(f"kill -{number} $$")
        assert result.code not in (0, None), f"SIG{number} gave the exit code {result.code}"


@promise(surface=True)
async def missing_program_is_a_result(trial: PromiseTrial) -> None:
    """A program that does not exist gives the exit code 127, with its name on standard error."""
    result = await trial.sandbox.exec(["no-such-program"], timeout_s=10)
    same(result.code, 127, "the exit code")
    assert b"no-such-program" in result.stderr, f"standard error does not name it: {result.stderr!r}"


@promise(surface=True)
async def unexecutable_file_is_a_result(trial: PromiseTrial) -> None:
    """A file that is not executable gives the exit code 126, with a reason on standard error."""
    await trial.sandbox.write_file(f"plain-{trial.mark}", b"text\n")
    result = await trial.sandbox.exec([f"./plain-{trial.mark}"], timeout_s=10)
    same(result.code, 126, "the exit code")
    assert b"ermission denied" in result.stderr, f"standard error gives no reason: {result.stderr!r}"


@promise(surface=True)
async def arguments_are_not_interpreted(trial: PromiseTrial) -> None:
    """Arguments reach the program unchanged: quotes, stars, newlines, empty ones, bytes that are not text."""
    words = ["$HOME", "a b", "`id`", "'", '"', "*", "", "-n", "\n", "é", os.fsdecode(b"\xff\xfe")]
    result = await trial.sandbox.exec(["printf", "%s|", *words], timeout_s=10)
    same(result.stdout, b"".join(os.fsencode(word) + b"|" for word in words), "what printf was given")


@promise(surface=True)
async def too_long_arguments_are_a_tool_error(trial: PromiseTrial) -> None:
    """An argument or variable that the kernel rejects as too long, or too many of them, raise ToolError immediately."""
    for argv, env in (
        (["echo", "x" * 3_000_000], {}),
        (["echo", *["x" * 1_000] * 3_000], {}),
        (["echo"], {"LONG": "x" * 3_000_000}),
    ):
        with raises(ToolError, "bytes", "use a file or the input"):
            await trial.sandbox.exec(argv, timeout_s=10, env=env)
    same(await trial.sh("echo fine"), "fine\n", "what the next command prints")


@promise(surface=True)
async def standard_input_is_complete(trial: PromiseTrial) -> None:
    """All of `stdin` reaches the command, whatever its bytes; without `stdin`, the input is empty."""
    data = os.urandom(3_000_000)
    result = await trial.sandbox.exec(["cat"], timeout_s=30, stdin=data)
    assert result.stdout == data, f"{len(data)} bytes went in and {len(result.stdout)}, perhaps others, came out"
    same((await trial.sandbox.exec(["cat"], timeout_s=10)).stdout, b"", "the output of `cat` without input")


@promise(surface=True)
async def input_may_stay_unread(trial: PromiseTrial) -> None:
    """A command that does not read its input is not affected by it."""
    result = await trial.sandbox.exec(["true"], timeout_s=20, stdin=bytes(3_000_000))
    same((result.code, result.stderr), (0, b""), "the exit code and standard error")


@promise(surface=True)
async def long_output_is_cut_and_drained(trial: PromiseTrial) -> None:
    """Output beyond a maximum is dropped while the command continues to its end."""
    result = await trial.sandbox.exec(["head", "-c", "100000000", "/dev/zero"], timeout_s=40)
    same(result.code, 0, "the exit code")
    assert 0 < len(result.stdout) < 50_000_000, f"{len(result.stdout)} of 100000000 bytes were kept"


@promise(surface=True)
async def binary_output_is_exact(trial: PromiseTrial) -> None:
    """All bytes that a command writes are returned unchanged."""
    result = await trial.bash(r"printf '\000\001\177\033[31m\r\n\004\377\200'")
    same(result.stdout, b"\x00\x01\x7f\x1b[31m\r\n\x04\xff\x80", "standard output")


@promise(surface=True)
async def time_limit_returns_the_output_so_far(trial: PromiseTrial) -> None:
    """At the time limit a command is killed; the result says so, has no exit code, and contains the output so far."""
    result = await trial.bash("echo part; sleep 100", timeout_s=0.5)
    same((result.code, result.timed_out, result.stdout), (None, True, b"part\n"), "code, time-out and output")


@promise()
async def time_limit_ends_all_processes(trial: PromiseTrial) -> None:
    """At the time limit all descendants of a command are killed, even if they left its session or ignore signals."""
    sleep = f"sleep {trial.mark}"
    result = await trial.bash(f"setsid {sleep} & (trap '' TERM INT HUP; {sleep}) & {sleep}", timeout_s=0.5)
    same(result.timed_out, True, "whether the time limit is told")
    assert not trial.sleepers(), f"processes {trial.sleepers()} of the command still run"


@promise(surface=True)
async def background_processes_are_not_waited_for(trial: PromiseTrial) -> None:
    """A command ends with its own process, even if a background process holds its output open and continues."""
    async with within(20):
        pid = (await trial.sh(f"sleep {trial.mark} & echo $!", timeout_s=60)).strip()
    await trial.sh(f"kill -9 {pid}")


@promise()
async def orphans_are_reaped(trial: PromiseTrial) -> None:
    """A process that a command left in the background leaves no zombie when it ends."""
    sleep = f"sleep 0.1{trial.mark}"
    await trial.sh(f"for i in {{1..40}}; do ({sleep} >/dev/null 2>&1 &); done")
    await until(lambda: not outside.processes_with(sleep.replace(" ", "\0")), "they ended")
    script = "for n in {1..200}; do grep -qs '^State:.Z' /proc/[0-9]*/status || break; sleep 0.05; done; echo $n"
    assert int(await trial.sh(script)) < 200, "there are zombies inside after ten seconds"


@promise()
async def cancelling_kills_the_command(trial: PromiseTrial) -> None:
    """Cancelling the caller of a command kills the command and its descendants."""
    script = f"setsid sleep {trial.mark} & sleep {trial.mark}"
    running = asyncio.create_task(trial.bash(script, timeout_s=60))
    await trial.until_asleep(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled(), "the cancellation was swallowed"
    await until(lambda: not trial.sleepers(), "the cancelled command was gone")


@promise(surface=True)
async def variables_can_be_added(trial: PromiseTrial) -> None:
    """The variables of the spec and of the call are in the environment; the call's take precedence."""
    shown = (await trial.bash("echo $GREETING $MORE", env={"MORE": "a  b"})).stdout
    same(shown, b"hello a b\n", "the variables of the spec and the call")
    same((await trial.bash("echo $GREETING", env={"GREETING": "bye"})).stdout, b"bye\n", "the variable of both")


@promise(surface=True)
async def a_command_begins_in_the_working_folder(trial: PromiseTrial) -> None:
    """A command runs in the spec's `workdir`, which is created, or in the call's `cwd`."""
    await trial.sh(f"mkdir d{trial.mark}; echo x > d{trial.mark}/file")
    same((await trial.bash("cat file", cwd=f"d{trial.mark}")).stdout, b"x\n", "what lies in the folder of the call")
    same((await trial.bash("pwd", cwd="/usr")).stdout, b"/usr\n", "the folder of the call")


@promise()
async def the_working_folder_of_the_spec_is_made(trial: PromiseTrial) -> None:
    """The `workdir` of the spec need not be in the image; commands, shells and kernels start there."""
    one = await trial.start(workdir="/work/some where")
    same(await trial.sh("pwd", one), "/work/some where\n", "the working folder of a command")
    shell, kernel = await trial.shell(one), await trial.kernel(one)
    same((await shell.run("pwd", 10)).output, "/work/some where\n", "the working folder of a shell")
    assert "'/work/some where'" in (await kernel.run("import os; os.getcwd()", 20)).output, "a kernel begins elsewhere"


@promise(surface=True)
async def missing_folder_is_a_result(trial: PromiseTrial) -> None:
    """A command whose `cwd` does not exist fails with an exit code and a reason, and is not run elsewhere."""
    result = await trial.bash("echo ran", cwd="/no/such/folder")
    assert result.code not in (0, None), f"the exit code is {result.code}"
    same(result.stdout, b"", "standard output")
    assert b"/no/such/folder" in result.stderr, f"standard error does not name it: {result.stderr!r}"


@promise(surface=True)
async def commands_run_concurrently(trial: PromiseTrial) -> None:
    """Many concurrent commands in one sandbox each get their own input, output and exit code."""
    results = await asyncio.gather(
        *(trial.bash(f"cat; exit {n}", stdin=b"%d" % n * 10_000, timeout_s=50) for n in range(_AT_ONCE))
    )
    for n, result in enumerate(results):
        same((result.code, result.stdout), (n, b"%d" % n * 10_000), f"what command {n} of {_AT_ONCE} came to")


@promise(surface=True)
async def signals_have_default_actions(trial: PromiseTrial) -> None:
    """A command starts with no signal blocked or ignored: a pipeline that is cut short ends without an error."""
    same(await trial.sh("yes | head -n 1"), "y\n", "the output of `yes | head -n 1`")
    states = (await trial.sh("grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -f 2")).split()
    # two numbers that the C library reserves
    masks = {int(state, 16) & ~(0b11 << 31) for state in states}
    same(masks, {0}, "the masks of blocked and of ignored signals")


@promise(surface=True)
async def no_descriptor_of_the_worker_is_open(trial: PromiseTrial) -> None:
    """A command has only its standard streams open."""
    listed = await trial.sandbox.exec(["ls", "/proc/self/fd"], timeout_s=10)
    # descriptor 3 is the folder that `ls` reads
    same({int(word) for word in listed.stdout.split()}, {0, 1, 2, 3}, "the numbers of the open descriptors")


@promise("python3")
async def a_terminal_can_be_opened(trial: PromiseTrial) -> None:
    """Programs can open their own terminal, as `script`, `tmux` and `pexpect` do."""
    code = (
        "import os, pty; pid, fd = pty.fork()\nif not pid: os.execvp('tty', ['tty'])\nprint(os.read(fd, 99).decode())"
    )
    assert "/dev/pts/" in await trial.python(code), "`tty` does not name a terminal"


@promise(surface=True)
async def commands_leave_nothing_in_the_worker(trial: PromiseTrial) -> None:
    """A command that has ended leaves no descriptor and no process in the worker."""
    await _run_some(trial)
    descriptors, zombies = outside.descriptors(), outside.zombies()
    await _run_some(trial)
    await until(lambda: outside.descriptors() <= descriptors, f"the worker had {descriptors} descriptors again")
    await until(lambda: outside.zombies() <= zombies, "the worker had waited for all that it started")


async def _run_some(trial: PromiseTrial) -> None:
    for _ in range(10):
        await trial.bash("cat", stdin=b"x" * 100_000)
    await trial.bash("sleep 100", timeout_s=0.05)
    await asyncio.gather(*(trial.bash("exit 3") for _ in range(10)))


@promise()
async def invalid_argv_is_a_tool_error(trial: PromiseTrial) -> None:
    """A command without words, or with an impossible word, raises ToolError that names it."""
    invalid: list[list[str]] = [[], [""], ["echo", "a\0b"], ["echo", "\ud800"], ["echo", "x" * 1_000_000], ["\0"]]
    invalid += [["echo", *["x" * 1000] * 3000], ["echo", "\udfff\ud800"]]
    for argv in invalid:
        with raises(ToolError):
            await trial.sandbox.exec(argv, timeout_s=10)
    for env in ({"": "x"}, {"A=B": "x"}, {"A": "\0"}, {"A": "x" * 200_000}):
        with raises(ToolError):
            await trial.sandbox.exec(["true"], timeout_s=10, env=env)
    with raises(ToolError):
        await trial.sandbox.exec(["true"], timeout_s=10, cwd="a\0b")
    result = await trial.sandbox.exec(["printf", "%s", "\udcff", ""], timeout_s=10)
    same((result.code, result.stdout), (0, b"\xff"), "code and output of a word that is not UTF-8")
