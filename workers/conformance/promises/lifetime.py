"""Promises about start and end: ids, attaching from another process, and complete removal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable
from pathlib import Path

from farm.errors import SandboxError
from workers.conformance import outside
from workers.conformance.trial import PromiseTrial, elsewhere, promise, raises, same, until, within
from workers.plugins.interfaces import Kernel, Sandbox, Shell

_PROMPT_S = 20.0
_CANCELLED_AFTER_S = (0.0, 0.001, 0.01, 0.03, 0.06, 0.1, 0.2)
_AGAIN = 5


def nothing_is_left(*texts: str) -> None:
    """Check that nothing with these texts in its name can be seen from outside."""
    left = outside.left_of(*texts)
    assert not left, f"there is left: {'; '.join(left[:5])}"


@promise()
async def sandbox_is_found_from_another_process(trial: PromiseTrial) -> None:
    """Another process of the node attaches to a sandbox by its id, uses it and stops it."""
    one = await trial.start(env={"X": "1"})
    await one.write_file("file", b"left here\n")
    async with elsewhere(trial, "attach", one.sandbox_id, env={"X": "1"}) as process:
        out, _ = await process.communicate()
    same(out, b"left here\n1\n", "what the other process sees in it")
    with raises(SandboxError, one.sandbox_id):
        await one.exec(["true"], timeout_s=10)
    nothing_is_left(one.sandbox_id)


@promise()
async def handles_are_equivalent(trial: PromiseTrial) -> None:
    """A handle by `attach` reaches the same files, processes and sockets as the one of the start."""
    one = await trial.start()
    two = await trial.provider.attach(one.sandbox_id, trial.spec())
    await one.write_file("file", b"written\n")
    same(await trial.sh("cat file", two), "written\n", "what the other handle reads")
    same((two.sandbox_id, two.socket_folder), (one.sandbox_id, one.socket_folder), "its id and socket folder")
    await two.stop()
    with raises(SandboxError, one.sandbox_id):
        await one.exec(["true"], timeout_s=10)


@promise()
async def attaching_to_a_missing_sandbox_is_an_error(trial: PromiseTrial) -> None:
    """Attaching to an id that does not run (any more) raises SandboxError with the id."""
    one = await trial.start()
    await one.stop()
    for sandbox_id in (one.sandbox_id, f"none-{trial.mark}"):
        with raises(SandboxError, sandbox_id):
            await trial.provider.attach(sandbox_id, trial.spec())


@promise()
async def duplicate_id_is_refused(trial: PromiseTrial) -> None:
    """Starting an id that is running raises SandboxError with the id, and does not disturb the first one."""
    one = await trial.start()
    with raises(SandboxError, one.sandbox_id):
        await trial.provider.start(one.sandbox_id, trial.spec())
    same(await trial.sh("echo fine", one), "fine\n", "what the first one says")


@promise()
async def id_can_be_reused(trial: PromiseTrial) -> None:
    """Once a sandbox is stopped its id is free, and the next one with that id starts without any of its data."""
    sandbox_id = trial.new_id()
    for _ in range(_AGAIN):
        one = await trial.start_as(sandbox_id)
        same(await trial.sh("ls -A; echo mine > file", one), "", "what a new sandbox has in its working folder")
        await one.stop()


@promise()
async def an_id_is_a_plain_name(trial: PromiseTrial) -> None:
    """An id that is not a plain name raises SandboxError, and no folder outside of the farm's own is touched."""
    for sandbox_id in ("", ".", "..", "a/b", "/tmp/x", ".hidden", "../../x", "a\0b", "a\nb", "x" * 300):
        for call in (trial.provider.start, trial.provider.attach):
            with raises(SandboxError):
                await call(sandbox_id, trial.spec())


@promise()
async def stop_leaves_nothing(trial: PromiseTrial) -> None:
    """Once `stop` returns, no process, mount, socket or file of the sandbox is left."""
    one = await trial.start()
    shell, kernel = await trial.shell(one), await trial.kernel(one)
    await trial.sh(f"mkdir -p a/b; chmod 000 a; (setsid sleep {trial.mark} >/dev/null 2>&1 &)", one)
    await trial.sh("cd /tmp; d=$(printf 'd/%.0s' {1..300}); mkdir -p $d; touch $d$(printf 'x%.0s' {1..255})", one)
    await shell.run(f"trap '' TERM INT HUP; sleep {trial.mark} &", 10)
    await kernel.run(f"import subprocess; p = subprocess.Popen(['sleep', '{trial.mark}'], start_new_session=True)", 20)
    await trial.until_asleep(3)
    await one.stop()
    nothing_is_left(one.sandbox_id, f"sleep\0{trial.mark}")


@promise(surface=True)
async def calls_after_stop_are_sandbox_errors(trial: PromiseTrial) -> None:
    """After `stop` every method of the sandbox, its shells and kernels raises SandboxError with the id."""
    one = await trial.start()
    shell, kernel = await trial.shell(one), await trial.kernel(one)
    await one.stop()
    for name, call in _calls(trial.folder, one, shell, kernel).items():
        try:
            with raises(SandboxError, one.sandbox_id):
                await call
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    await shell.close()
    await kernel.close()


def _calls(folder: Path, one: Sandbox, shell: Shell, kernel: Kernel) -> dict[str, Awaitable[object]]:
    source = folder / "source"
    source.write_text("x")
    return {
        "exec": one.exec(["true"], timeout_s=10),
        "open_shell": one.open_shell(),
        "open_kernel": one.open_kernel(),
        "read_file": one.read_file("x"),
        "write_file": one.write_file("x", b""),
        "upload": one.upload(source, "x"),
        "download": one.download("x", folder / "target"),
        "shell.run": shell.run("true", 10),
        "kernel.run": kernel.run("1", 10),
        "kernel.restart": kernel.restart(),
    }


@promise(surface=True)
async def stop_is_idempotent(trial: PromiseTrial) -> None:
    """`stop` may be called repeatedly and concurrently."""
    one = await trial.start()
    await asyncio.gather(*(one.stop() for _ in range(_AGAIN)))
    await one.stop()


@promise()
async def stop_ends_running_commands(trial: PromiseTrial) -> None:
    """`stop` returns soon even if commands, shells and kernels are busy; each of those calls ends with SandboxError."""
    one = await trial.start()
    shell, kernel = await trial.shell(one), await trial.kernel(one)
    sleep = f"sleep {trial.mark}"
    calls = {
        "exec": asyncio.ensure_future(trial.bash(f"trap '' TERM; {sleep}; {sleep}", one, 100)),
        "shell.run": asyncio.ensure_future(shell.run(f"trap '' INT TERM; {sleep}; {sleep}", 100)),
        "kernel.run": asyncio.ensure_future(kernel.run(f"import os; os.system('{sleep}')", 100)),
    }
    await trial.until_asleep(3)
    async with within(_PROMPT_S):
        await one.stop()
        nothing_is_left(one.sandbox_id, f"sleep\0{trial.mark}")
        await asyncio.wait(calls.values())
    for name, call in calls.items():
        error = call.exception()
        assert isinstance(error, SandboxError), f"{name} ended with {error or call.result()!r}, and not SandboxError"


@promise(time_s=120)
async def cancelled_start_leaves_nothing(trial: PromiseTrial) -> None:
    """A start that is cancelled at any time leaves no process, mount or file."""
    for after_s in _CANCELLED_AFTER_S:
        sandbox_id = trial.new_id()
        starting = asyncio.ensure_future(trial.provider.start(sandbox_id, trial.spec()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(starting), after_s)
        if starting.cancel():
            await asyncio.gather(starting, return_exceptions=True)
        if starting.cancelled() or starting.exception():
            await until(lambda name=sandbox_id: not outside.left_of(name), "nothing was left of it")  # type: ignore[misc]
        else:
            await starting.result().stop()
            nothing_is_left(sandbox_id)


@promise()
async def failed_start_leaves_nothing(trial: PromiseTrial) -> None:
    """A start that fails raises SandboxError and leaves no process, mount or file."""
    broken = trial.folder / "broken"
    (broken / "usr").mkdir(parents=True)
    for fields in ({"image": str(broken)}, {"image": f"/none-{trial.mark}"}, {"workdir": "relative"}):
        sandbox_id = trial.new_id()
        with raises(SandboxError):
            await trial.provider.start(sandbox_id, trial.spec(**fields))
        nothing_is_left(sandbox_id)


@promise()
async def a_killed_worker_leaves_nothing(trial: PromiseTrial) -> None:
    """Killing the process that started a sandbox, even with -9, ends the sandbox, and nothing of it is left."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        sandbox_id = trial.new_id()
        async with elsewhere(trial, "start", sandbox_id) as process:
            assert process.stdout
            same(await process.stdout.readline(), b"up\n", "what the other process says")
            process.send_signal(number)
        await until(
            lambda name=sandbox_id: not outside.left_of(name, f"sleep\0{trial.mark}"),  # type: ignore[misc]
            f"nothing was left after {number.name}",
        )
