"""Cost of a tool call: shell actions, cells, edits and files, in sandboxes by Apptainer, as the worker calls them.

Shells and files are measured in a sandbox with its own small image, Python in one with the node's system and the
packages of the peers: ipykernel and SWE-ReX, which are downloaded from the package index once and are not part of the
farm.

"Busy" means 32 more sandboxes, each with a shell that runs `echo hi` and `ls /usr` in turn, 50 ms after the end of the
last one, driven by the same process and event loop as the measured one. "Saturated" means 32 shells that run `echo hi`
again at once. For comparison: the container runtime's own `exec` in an instance of the same image, unpacked, which is
faster than from the file; tmux with a bash in such an instance, polled every 0.5 s; SWE-ReX's bash session inside a
sandbox, without its HTTP server; jupyter_client and ipykernel over TCP inside a sandbox; a fresh `python3 -c`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.peers.raw_apptainer import RawApptainer, instance
from benchmarks.peers.raw_tmux import Tmux
from farm.errors import FarmError
from farm.records.request import SandboxSpec
from testkit.report import Report, options
from testkit.scratch_folder import conditions, sandbox_config, scratch, small_image
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import image as unpacked
from workers.sandboxes.singularity import SingularityProvider
from workers.tools.bash import BashArguments, BashTool
from workers.tools.edit import EditArguments, EditTool
from workers.tools.python import PythonArguments, PythonTool

N_BUSY = 32
THINK_S = 0.05
ECHO = BashArguments.model_validate({"command": "echo hi"})
LS = BashArguments.model_validate({"command": "ls /usr"})
CELL = PythonArguments(code="1+1")
PEERS = ("ipykernel==7.4.0", "swe-rex==1.4.0")
START_WIDTH = 4
_CALL_S = 60.0


def main() -> None:
    result = options(__doc__)
    provider = SingularityProvider()
    with scratch() as folder:
        if missing := provider.missing():
            sys.exit(missing)
        report = Report(f"tools, in sandboxes by Apptainer ({conditions()})")
        image = small_image()
        peers = _peers_of_the_shell(folder, image, result)
        asyncio.run(_measure(report, provider, image, peers, result))
    report.show(result.json)


def _peers_of_the_shell(folder: Path, image: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the median of an action with the raw command and with tmux, in ms."""
    peers = {}
    try:
        raw = RawApptainer(folder / "raw")
        with instance(raw, unpacked(sandbox_config(), str(image)).folder) as name:
            words = ["exec", f"instance://{name}", "bash", "-c", "echo hi"]
            peers["apptainer_exec"] = _median_ms(lambda: raw.run(*words) == "hi\n", 12 if args.quick else 60)
            if shutil.which("tmux"):
                shell = [*raw.words, "exec", f"instance://{name}", "bash", "--norc", "--noprofile"]
                tmux = Tmux(raw.folder, shell, raw.env)
                peers["tmux"] = _median_ms(lambda: "\nhi" in tmux.run("echo hi"), 5 if args.quick else 20)
                tmux.close()
            else:
                print("no tmux on PATH: it is left out", file=sys.stderr)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"left out: {error}", file=sys.stderr)
    return peers


def _median_ms(action: Callable[[], bool], n: int) -> float:
    times = []
    for _ in range(n + 2):
        started = time.perf_counter()
        assert action()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1000


async def _measure(
    report: Report, provider: SingularityProvider, image: Path, peers: dict[str, float], args: argparse.Namespace
) -> None:
    small = SandboxSpec(image=str(image))
    python = SandboxSpec(packages=PEERS)
    async with _sandbox(provider, small) as sandbox:
        with_peers = await _with_packages(provider, python)
        if with_peers is None:
            python = SandboxSpec()
        else:
            peers["swe_rex"] = statistics.median(await _inside(with_peers, "swerex", 8 if args.quick else 60)) * 1000
        await _shell(report, sandbox, peers, args)
        await _shell_among_others(report, provider, small, args)
        await _files(report, sandbox, args)
        await _cells(report, provider, python, with_peers, args)
        if with_peers:
            await with_peers.stop()


async def _with_packages(provider: SingularityProvider, spec: SandboxSpec) -> Sandbox | None:
    """Return a sandbox with the packages of the peers; None if they are unavailable."""
    try:
        return await provider.start(f"peers-{uuid4().hex[:8]}", spec)
    except FarmError as error:
        print(f"SWE-ReX and ipykernel are left out: {error}", file=sys.stderr)
        return None


async def _inside(sandbox: Sandbox, peer: str, n: int) -> list[float]:
    """Return the seconds that a peer's program measures inside."""
    program = Path(__file__).with_name("peers").joinpath(f"peer_{peer}.py").read_bytes()
    done = await sandbox.exec(["python3", "-", str(n)], timeout_s=120, stdin=program)
    if done.code:
        raise RuntimeError(f"{peer}: {done.stderr.decode()[-1000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


@asynccontextmanager
async def _sandbox(provider: SingularityProvider, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    sandbox = await provider.start(f"tools-{uuid4().hex[:8]}", spec)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def _times(action: Callable[[], Awaitable[Any]], n: int, warm_up: int = 5) -> list[float]:
    """Return the seconds of each of n calls, one after the other."""
    times = []
    for _ in range(n + warm_up):
        started = time.perf_counter()
        await action()
        times.append(time.perf_counter() - started)
    return times[warm_up:]


async def _echo(tool: BashTool) -> None:
    observation = await tool.call(ECHO, _CALL_S)
    assert observation.text.strip() == "hi", observation


async def _shell(report: Report, sandbox: Sandbox, peers: dict[str, float], args: argparse.Namespace) -> None:
    tool = BashTool(sandbox)
    opened = await _times(lambda: _echo(tool), 1, 0)
    report.times("first_action_of_a_fresh_shell", opened)
    times = await _times(lambda: _echo(tool), 500 if args.quick else 5000, 100)
    ours = report.times("bash_echo", times, at_most=0.3, **peers)
    for peer, aim in (("tmux", 1000), ("swe_rex", 300), ("apptainer_exec", None)):
        if peer in peers:
            report.add(f"bash_echo_faster_than_{peer}", peers[peer] / ours, "times", at_least=aim)
    report.times("bash_ls", await _times(lambda: tool.call(LS, _CALL_S), 100 if args.quick else 1000))
    await tool.close()


async def _shell_among_others(
    report: Report, provider: SingularityProvider, spec: SandboxSpec, args: argparse.Namespace
) -> None:
    """Measure in one sandbox, while 32 others have their own work; and in all 32 at once."""
    async with contextlib.AsyncExitStack() as stack:
        width = asyncio.Semaphore(START_WIDTH)

        async def opened() -> BashTool:
            async with width:
                tool = BashTool(await stack.enter_async_context(_sandbox(provider, spec)))
                await _echo(tool)
                return tool

        measured, *others = await asyncio.gather(*(opened() for _ in range(N_BUSY + 1)))
        enough = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for tool in others:
                group.create_task(_be_busy(tool, enough))
            times = await _times(lambda: _echo(measured), 500 if args.quick else 3000, 50)
            enough.set()
        report.times("bash_echo_with_32_busy", times, at_most=3)
        n = 50 if args.quick else 300
        started = time.perf_counter()
        result = await asyncio.gather(*(_times(lambda tool=tool: _echo(tool), n, 0) for tool in others))  # type: ignore[misc]
        elapsed_s = time.perf_counter() - started
        report.times("bash_echo_saturated", list(itertools.chain(*result)), per_s=n * N_BUSY / elapsed_s)
        await asyncio.gather(*(tool.close() for tool in (measured, *others)))


async def _be_busy(tool: BashTool, enough: asyncio.Event) -> None:
    """Run until `enough` is set, without cancelling a command: that would restart the shell."""
    while not enough.is_set():
        for command in (ECHO, LS):
            assert (await tool.call(command, _CALL_S)).text
            await asyncio.sleep(THINK_S)


async def _files(report: Report, sandbox: Sandbox, args: argparse.Namespace) -> None:
    n = 40 if args.quick else 400
    path = "/workspace/notes.txt"
    text = "".join(f"line {number}\n" for number in range(200))
    report.times("write_file", await _times(lambda: sandbox.write_file(path, text.encode()), n))
    report.times("read_file", await _times(lambda: sandbox.read_file(path), n))
    edit = EditTool(sandbox)
    view = EditArguments(command="view", path=path, view_range=[90, 110])
    report.times("edit_view", await _times(lambda: edit.call(view, _CALL_S), n))
    words = itertools.cycle((("line 100\n", "another\n"), ("another\n", "line 100\n")))

    async def replace() -> None:
        old, new = next(words)
        arguments = EditArguments(command="str_replace", path=path, old_str=old, new_str=new)
        await edit.call(arguments, _CALL_S)

    report.times("edit_str_replace", await _times(replace, n))
    report.times("exec_true", await _times(lambda: sandbox.exec(["true"], timeout_s=_CALL_S), n))


async def _cells(
    report: Report,
    provider: SingularityProvider,
    spec: SandboxSpec,
    with_peers: Sandbox | None,
    args: argparse.Namespace,
) -> None:
    """Compare IPython by the tool, and Jupyter's kernel through the same interface, with the usual ways."""
    first = await _first_cells(provider, spec, 5 if args.quick else 30)
    against = {}
    async with _sandbox(provider, spec) as sandbox:
        one = ["python3", "-c", "print(1+1)"]
        fresh = await _times(lambda: sandbox.exec(one, timeout_s=_CALL_S), 10 if args.quick else 60)
        against["fresh_python"] = statistics.median(fresh) * 1000
        started = {}
        if with_peers is not None:
            start_s, *tcp = await _inside(with_peers, "jupyter", 50 if args.quick else 500)
            against["jupyter_client_over_TCP"] = statistics.median(tcp) * 1000
            started["jupyter_client_over_TCP"] = start_s * 1000
        report.times(
            "first_cell_on_a_fresh_sandbox", first[1:], at_most=20, first_of_the_worker=first[0] * 1000, **started
        )
        tool = PythonTool(sandbox)

        async def cell() -> None:
            assert (await tool.call(CELL, _CALL_S)).text.endswith("2")

        times = await _times(cell, 300 if args.quick else 3000, 50)
        report.times("python_cell", times, at_most=0.6, **against)
        await tool.close()
    if with_peers is not None:
        kernel = await with_peers.open_kernel("python3")
        times = await _times(lambda: kernel.run("1+1", _CALL_S), 80 if args.quick else 500, 10)
        report.times("jupyter_cell", times, at_most=6, **against)
        await kernel.close()


async def _first_cells(provider: SingularityProvider, spec: SandboxSpec, n: int) -> list[float]:
    """Measure the tool's first call, on n fresh sandboxes; the very first of this process is before them."""
    times = []
    for _ in range(n + 1):
        async with _sandbox(provider, spec) as sandbox:
            tool = PythonTool(sandbox)
            times += await _times(lambda tool=tool: tool.call(CELL, _CALL_S), 1, 0)  # type: ignore[misc]
            await tool.close()
    return times


if __name__ == "__main__":
    main()
