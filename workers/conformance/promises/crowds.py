"""Promises about concurrency: sandboxes, shells and starts that do not disturb each other."""

from __future__ import annotations

import asyncio
import os
import secrets

from workers.conformance import outside
from workers.conformance.trial import NotPermitted, NotTried, PromiseTrial, program, promise, same, until
from workers.plugins.interfaces import Sandbox

_MANY = 20
_TAKE = {
    "inotify instances": "libc = ctypes.CDLL(None)\nwhile (n := libc.inotify_init1(0)) >= 0: held.append(n)",
    "signals that wait": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {40})\nlibc = ctypes.CDLL(None)\nvalue = ctypes.c_void_p(0)\n"
        "while libc.sigqueue(os.getpid(), 40, value) == 0: held.append(0)"
    ),
    "timers": "libc = ctypes.CDLL(None)\n"
    "while libc.timer_create(0, None, ctypes.create_string_buffer(8)) == 0: held.append(0)",
    "watched files": (
        "libc = ctypes.CDLL(None)\nn = libc.inotify_init1(0)\nos.mkdir('w')\n"
        "for m in range(3000):\n    open(f'w/{m}', 'w').close()\n"
        "    held.append(libc.inotify_add_watch(n, f'w/{m}'.encode(), 2))"
    ),
    # last, because these stay when the program has ended
    "message queues": (
        "libc = ctypes.CDLL('librt.so.1', use_errno=True)\n"
        "while (n := libc.mq_open(f'/q{len(held)}'.encode(), 0o102, 0o600, None)) >= 0: held.append(n)"
    ),
}
"""One program's use of each resource, as much as it gets."""
_SEND = """
import fcntl, os, socket
one, two = socket.socketpair()
socket.send_fds(one, [b"x"], [0])
print(fcntl.fcntl(os.pipe()[1], 1032))
"""


@promise(time_s=180)
async def many_sandboxes_answer(trial: PromiseTrial) -> None:
    """Twenty sandboxes start at the same time, each answers with its own data, and all are stopped at the same time."""
    sandboxes = await asyncio.gather(*(trial.start(env={"NUMBER": str(n)}) for n in range(_MANY)))
    await asyncio.gather(*(one.write_file("own", f"{n} ".encode()) for n, one in enumerate(sandboxes)))
    answers = await asyncio.gather(*(trial.sh("cat own; echo $NUMBER", one, 60) for one in sandboxes))
    same(answers, [f"{n} {n}\n" for n in range(_MANY)], "what they answer")
    await asyncio.gather(*(one.stop() for one in sandboxes))
    left = outside.left_of(*(one.sandbox_id for one in sandboxes))
    assert not left, f"there is left: {'; '.join(left[:5])}"


@promise(time_s=120)
async def shells_of_many_sandboxes_run_concurrently(trial: PromiseTrial) -> None:
    """Shells and kernels in several sandboxes, busy at the same time, each get their own output and keep state."""
    sandboxes = await asyncio.gather(*(trial.start() for _ in range(5)))
    shells = await asyncio.gather(*(trial.shell(one) for one in sandboxes))
    kernels = await asyncio.gather(*(trial.kernel(one) for one in sandboxes))
    for n, (shell, kernel) in enumerate(zip(shells, kernels, strict=True)):
        await asyncio.gather(shell.run(f"X={n}", 20), kernel.run(f"x = {n}", 20))
    for _ in range(5):
        results = await asyncio.gather(*(shell.run("seq 1000 >/dev/null; echo $X", 30) for shell in shells))
        same([result.output for result in results], [f"{n}\n" for n in range(5)], "what the shells say")
        shown = await asyncio.gather(*(kernel.run("print(x)", 30) for kernel in kernels))
        same([result.output for result in shown], [f"{n}\n" for n in range(5)], "what the kernels say")


@promise(time_s=180)
async def sandboxes_start_while_others_stop(trial: PromiseTrial) -> None:
    """Starting, using and stopping sandboxes may overlap in any way."""

    async def live(n: int) -> None:
        one: Sandbox = await trial.start(env={"NUMBER": str(n)})
        await asyncio.sleep(secrets.randbelow(100) / 1000)
        same(await trial.sh("echo $NUMBER", one, 60), f"{n}\n", "what a sandbox says")
        await one.stop()

    await asyncio.gather(*(live(n) for n in range(_MANY)))


async def _taking(trial: PromiseTrial, one: Sandbox, code: str, words: str = "") -> str:
    """Start a program that takes what it gets and keeps it; return what it says then. `pid` is a file with its pid."""
    await one.write_file("take.py", code.encode())
    start = f"rm -f out; python3 take.py {words} > out 2>&1 & echo $! > pid"
    return await trial.sh(f"{start}; until grep -qs . out; do sleep 0.05; done; cat out", one, 60)


@promise("python3", time_s=120)
async def one_sandbox_does_not_starve_others(trial: PromiseTrial) -> None:
    """A sandbox that exhausts all resources that the kernel counts for a user leaves the next one enough to work."""
    one, two = await trial.start(), await trial.start()
    for what, code in _TAKE.items():
        code = f"import ctypes, os, signal, time\nheld = []\n{code}\nprint('taken', flush=True)\ntime.sleep(100)"
        same(await _taking(trial, one, code), "taken\n", f"what a program says that takes {what}")
        missing = (await trial.python(program("use_counted_resources"), on=two)).strip()
        assert not missing, f"while another has taken {what}, these are refused: {missing}"
        await trial.sh("kill -9 $(cat pid)", one)


@promise("python3", time_s=120)
async def tools_survive_a_lack_of_descriptors(trial: PromiseTrial) -> None:
    """While a sandbox has sent itself all the descriptors it may, shells, cells and files of others work as before."""
    one, two = await trial.start(), await trial.start()
    same(await _taking(trial, one, program("send_descriptors")), "taken\n", "what the program says")
    for sandbox in (two, one):
        kernel = await trial.kernel(sandbox)
        assert "2" in (await kernel.run("1 + 1", 20)).output, "a cell does not run"
        shell = await trial.shell(sandbox)
        same((await shell.run("echo fine", 20)).output, "fine\n", "what a shell says")
        await sandbox.write_file("own", b"own")
        same(await sandbox.read_file("own"), b"own", "what a file holds")
    same(await trial.sh("echo fine", await trial.start()), "fine\n", "what a new sandbox says")


@promise("python3", time_s=120)
async def per_user_limits_apply_to_each_sandbox(trial: PromiseTrial) -> None:
    """If each sandbox has its own user id, one uses as many descriptors in flight and pages of pipes as it can, but
    a program in another can still send descriptors and have pipes of full size.
    """
    one, two = await trial.start(), await trial.start()
    users = {await _user(trial, sandbox) for sandbox in (one, two)}
    if len(users) == 1:
        shared = "sandboxes share one user of this node, so that they share these"
        raise NotTried(shared) if os.geteuid() == 0 else NotPermitted(f"{shared}: only root can give them ids")
    taken = await _taking(trial, one, program("send_descriptors"), "pipes")
    same(taken, "taken\n", "what the program says that takes all")
    same(await trial.python(_SEND, on=two), "65536\n", "the size of a pipe in another, where a descriptor is sent")


async def _user(trial: PromiseTrial, sandbox: Sandbox) -> int:
    seconds = f"{trial.mark}.{secrets.randbelow(10**6):06d}"
    await trial.sh(f"sleep {seconds} >/dev/null 2>&1 &", sandbox)
    await until(lambda: outside.processes_with(seconds), "the program that was started is there")
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in outside.processes_with(seconds)}  # noqa: PTH116
    assert len(owners) == 1, f"one sandbox has processes of {len(owners)} users"
    return owners.pop()
