"""Episodes that run the policy's text in a shared server: none reaches the server or another episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from farm.errors import HandlerError
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS
from tests.integration.environments.conftest import EnvironmentRun
from workers.environments.environment_servers import EnvironmentServer, environment_servers
from workers.testing.fakes import answering

TRIED = """
import asyncio, ctypes, fcntl, mmap, os, platform, resource, signal, socket, subprocess, sys, tempfile, threading
libc = ctypes.CDLL(None, use_errno=True)
server = os.getppid()
siblings = [int(each) for each in os.listdir("/proc") if each.isdigit() and int(each) not in (1, os.getpid())]
connection = next(fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}"))


def called(number, *arguments):
    # the numbers are those of x86-64
    if platform.machine() != "x86_64":
        raise PermissionError(1, "not tried")
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def run_code_of_server():
    with open(f"/proc/{server}/mem", "r+b", 0) as memory:
        memory.write(b"1")


ACTS = {
    "kill of the server": lambda: os.kill(server, 0),
    "kill of all": lambda: os.kill(-1, signal.SIGURG),
    "kill of the group": lambda: os.killpg(os.getpgid(server), signal.SIGURG),
    "queued signal": lambda: called(129, server, 0, 0),
    "tgkill": lambda: called(234, server, server, 0),
    "tkill": lambda: called(200, server, 0),
    "kill of a sibling": lambda: [os.kill(each, 0) for each in siblings],
    "pidfd": lambda: os.pidfd_open(server),
    "memory, written": run_code_of_server,
    "memory, read": lambda: open(f"/proc/{server}/mem", "rb").read(1),
    "memory of a sibling": lambda: [open(f"/proc/{each}/mem", "rb") for each in siblings],
    "variables of the server": lambda: open(f"/proc/{server}/environ", "rb").read(),
    "descriptors of the server": lambda: os.readlink(f"/proc/{server}/fd/0"),
    "addresses of the server": lambda: open(f"/proc/{server}/maps").read(),
    "ptrace": lambda: called(101, 16, server, 0, 0),
    "process_vm_readv": lambda: called(310, server, 0, 0, 0, 0, 0),
    "process_vm_writev": lambda: called(311, server, 0, 0, 0, 0, 0),
    "kcmp": lambda: called(312, server, os.getpid(), 0, 0, 0),
    "owner of a descriptor": lambda: fcntl.fcntl(connection, fcntl.F_SETOWN, server),
    "signal of a descriptor": lambda: fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL),
    "owner by ioctl": lambda: fcntl.ioctl(connection, 0x8901, server.to_bytes(4, "little")),
    "owner of a socket by ioctl": lambda: fcntl.ioctl(connection, 0x8902, server.to_bytes(4, "little")),
    "limit of the server": lambda: resource.prlimit(server, resource.RLIMIT_CPU, (1, 1)),
    "priority of the server": lambda: os.setpriority(os.PRIO_PROCESS, server, 19),
    "processor of the server": lambda: os.sched_setaffinity(server, {0}),
    "no end with the server": lambda: called(157, 1, 0, 0, 0, 0),
    "memory that can be looked into": lambda: called(157, 4, 1, 0, 0, 0),
    "fork": os.fork,
    "program": lambda: subprocess.run(["true"]),
    "thread": threading.Thread(target=int).start,
    "namespace": lambda: called(272, 0x10000000),
    "file": lambda: open("/workspace/json.py", "w"),
    "file of the server": lambda: open("/opt/farm/environment/workers/environments/environment.py", "a"),
    "temporary file": tempfile.TemporaryFile,
    "memory file": lambda: os.memfd_create("x"),
    "socket of the server, removed": lambda: os.unlink("/run/farm/environment.sock"),
    "socket of the server, moved": lambda: os.rename("/run/farm/environment.sock", "/run/farm/old.sock"),
    "socket": lambda: socket.socket(socket.AF_UNIX),
    "shared memory": lambda: called(29, 1, 4096, 0o1666),
    "much shared memory": lambda: mmap.mmap(-1, 1 << 30),
    "io_uring": lambda: called(425, 1, 0),
}
for name, act in ACTS.items():
    try:
        act()
        seen.append(name)
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", 1) not in (1, 12, 13, 2):
            seen.append(f"{name}: {error}")


async def slept():
    await asyncio.sleep(0.01)
    return sum(range(1000))

ours, theirs = os.pipe()
os.write(theirs, b"x")
seen.append([asyncio.run(slept()), os.read(ours, 1), len(open("/proc/self/stat").read()) > 9])
"""


@pytest.mark.parametrize("kind", [*PROVIDERS])
def test_episode_can_only_compute_and_read(loop: asyncio.Runner, kind: str) -> None:
    if missing := PROVIDERS[kind]().missing():
        absent(missing)
    run = EnvironmentRun("evaluating", answering(TRIED), answering(""), answering(""), kind=kind)
    assert loop.run(run.score()) == 0.75
    assert run.observed[0] == "[[499500, b'x', True]]"


@pytest.mark.parametrize("fault", ["write", "thread", "temporary"])
def test_refused_operation_names_the_setting_that_allows_it(loop: asyncio.Runner, fault: str) -> None:
    kwargs = {"fault": f"reset:{fault}"}
    with pytest.raises(HandlerError, match=r"reset\(\) broke: .*set `shared = False` in its class"):
        loop.run(EnvironmentRun("unruly", answering("a"), kwargs=kwargs).score())
    assert loop.run(EnvironmentRun("lonely", answering("win"), kwargs=kwargs).score()) == 1.0


def test_step_refused_in_a_shared_server_is_run_in_its_own_server(loop: asyncio.Runner) -> None:
    writing = EnvironmentRun("evaluating", answering("open('/workspace/x', 'w')"), answering(""), answering(""))
    assert loop.run(writing.score()) == 0.75


LAST = {
    "a connection that is shut": "import os, socket; socket.socket(fileno={}).shutdown(2)",
    "a connection that is closed": "import os; os.close({})",
    "all connections closed": "import os; os.closerange(0, 99)",
    "an exit": "import os; os._exit(0)",
    "a fault": "import ctypes; ctypes.string_at(0)",
    "an exit of Python": "exit(0)",
    "memory": "[bytes(1 << 20) for _ in range(1 << 20)]",
    "shared memory": "import mmap; mmap.mmap(-1, 1 << 40)",
    "deep recursion": "f = lambda: f(); f()",
    "half a reply": "import os; os.write({}, b'{{\"reply\": '); os._exit(0)",
    "no JSON": "import os; os.write({}, b'\\n\\n')",
    "another reply": 'import os; os.write({}, b\'{{"reply": {{"reward": 1e9}}}}\\n\')',
}


@pytest.mark.parametrize("how", LAST)
def test_text_that_ends_its_episode_gets_no_reward_and_affects_no_other(loop: asyncio.Runner, how: str) -> None:
    connection = (
        "next(fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}') and os.stat(fd).st_mode >> 12 == 12)"
    )
    ending = EnvironmentRun("evaluating", answering(""), answering(LAST[how].format(connection)), answering(""))
    others = [EnvironmentRun("evaluating", *[answering("seen.append(1)")] * 3) for _ in range(3)]

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(each.score() for each in (*others, ending)))

    assert loop.run(all_of_them()) == [0.75] * 3 + [0.25]
    assert ending.submission.rewards == (0.25, 0.0)


POISON = "import sys, json; json.dumps = None; sys.modules['workers.environments.environment'].Step = None; seen += 'x'"


def test_changes_of_an_episode_do_not_affect_others(loop: asyncio.Runner) -> None:
    for text in (POISON, "seen.append(1)"):
        loop.run(EnvironmentRun("evaluating", answering(text), answering(""), answering("")).score())
    honest = EnvironmentRun("evaluating", answering("seen.append(1)"), answering(""), answering(""))
    assert loop.run(honest.score()) == 0.75
    assert honest.observed[0] == "[1]"


@pytest.mark.parametrize("environment", ["unruly", "bounded"])
def test_killed_shared_server_costs_its_episodes_no_reward(loop: asyncio.Runner, environment: str) -> None:
    """Whoever ends it: they continue from their recorded actions, with the rewards that they had."""
    runs = [EnvironmentRun(environment, *[answering(f"{n} {k}") for k in range(3)], seed=n) for n in range(4)]
    killing = EnvironmentRun(environment, answering("a"), answering("b"), answering("win"))
    killing.policy.complete = _after(1, killing.policy.complete, _kill_servers)  # type: ignore[method-assign]

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(each.score() for each in (*runs, killing)))

    assert loop.run(all_of_them()) == [0.75] * 4 + [1.5]
    assert [call.reward for call in killing.calls.values()] == [0.25, 0.25, 1.0]
    for n, run in enumerate(runs):
        assert run.observed == [repr([f"{n} {k}", []]) for k in range(3)]
    # and it is replaced
    assert loop.run(EnvironmentRun(environment, answering("win")).score()) == 1.0


def test_text_that_ends_its_own_server_gets_no_reward(loop: asyncio.Runner) -> None:
    run = EnvironmentRun("lonely", answering("a"), answering("break:kill_all"), answering("win"))
    assert loop.run(run.score()) == 0.25
    assert run.submission.rewards == (0.25, 0.0)


def _after(n: int, call: Callable[..., Awaitable[Any]], act: Callable[[], Awaitable[None]]) -> Callable[..., Any]:
    """Return the call with another action before it after a number of calls."""
    n_calls = 0

    async def called(*arguments: Any) -> Any:
        nonlocal n_calls
        if n_calls == n:
            await act()
        n_calls += 1
        return await call(*arguments)

    return called


async def _kill_servers() -> None:
    servers = [each.result() for each in environment_servers()._servers.values() if each.done()]
    for server in servers:
        assert isinstance(server, EnvironmentServer)
        await server.sandbox.exec(["bash", "-c", "kill -9 -1"], timeout_s=60)
        await asyncio.wait({server.command})
