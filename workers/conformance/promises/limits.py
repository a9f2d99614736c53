"""Promises about limits: a sandbox that uses too much gets a message, continues, and does not affect others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import FarmError
from farm.records.request import SandboxLimits
from workers.conformance.trial import PromiseTrial, described, eventually, program, promise, same, short
from workers.plugins.interfaces import CellResult, ExecResult, Sandbox, ShellResult

_HOG = "held = []\nwhile True: held.append(bytearray(b'x' * 5_000_000))"
_SMALL = SandboxLimits(memory_mb=300, n_processes=80, disk_mb=100, file_mb=4096)
_TIGHT = SandboxLimits(memory_mb=256, n_processes=200, disk_mb=200)
_LITTLE_DISK = SandboxLimits(memory_mb=256, disk_mb=20)
_ENDS_S = 30.0
_PERIOD_S = 0.2
_TAKE_DISK = {
    "reserved": "f = os.open('big', os.O_CREAT | os.O_RDWR); os.posix_fallocate(f, 0, 70 << 20)",
    "reserved and closed": (
        "f = os.open('big', os.O_CREAT | os.O_RDWR)\nos.posix_fallocate(f, 0, 70 << 20); os.close(f)"
    ),
    "a byte in each block": (
        "f = os.open('big', os.O_CREAT | os.O_RDWR)\nfor n in range(0, 70 << 20, 4096): os.pwrite(f, b'x', n)"
    ),
    "mapped": (
        "f = os.open('big', os.O_CREAT | os.O_RDWR); os.ftruncate(f, 70 << 20); m = mmap.mmap(f, 0); os.close(f)\n"
        "for n in range(0, 70 << 20, 4096): m[n] = 1"
    ),
    "deep": (
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "for n in range(7): open(str(n), 'wb').write(bytes(10 << 20))"
    ),
}


def names(result: ExecResult | ShellResult | CellResult, *words: str) -> None:
    """Check that the result is not a timeout, and names a limit with one of these words."""
    assert not result.timed_out, f"it ran into its time limit instead: {short(described(result))}"
    text = described(result).lower()
    assert any(word in text for word in words), f"it should tell of {' or '.join(words)}, and says: {short(text)}"


async def goes_on(trial: PromiseTrial, sandbox: Sandbox) -> None:
    """Check that the sandbox runs programs as before, possibly after a moment."""
    await eventually(lambda: _answers(trial, sandbox), "the sandbox answered", _ENDS_S)
    result = await trial.bash("cat /proc/self/stat >/dev/null; echo fine", sandbox)
    same((result.code, result.stdout, result.limit), (0, b"fine\n", ""), "what the next command comes to")


async def _answers(trial: PromiseTrial, sandbox: Sandbox) -> bool:
    result = await trial.bash("cat /proc/self/stat >/dev/null", sandbox)
    return (result.code, result.limit) == (0, "")


@asynccontextmanager
async def undisturbed(trial: PromiseTrial) -> AsyncIterator[None]:
    """Check that another sandbox of the same kind answers and loses no process while the block runs."""
    neighbour = await trial.start()
    await trial.sh(f"sleep {trial.mark} >/dev/null 2>&1 &", neighbour)
    await trial.until_asleep()
    probing = asyncio.create_task(_ask(trial, neighbour))
    try:
        yield
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    if not probing.cancelled():
        probing.result()
    assert trial.sleepers(), "a process of the neighbour was ended"


async def _ask(trial: PromiseTrial, neighbour: Sandbox) -> None:
    while True:
        try:
            same(await trial.sh("cat /proc/self/comm", neighbour), "cat\n", "what the neighbour answers")
        except (AssertionError, FarmError) as error:
            raise AssertionError(f"the neighbour is disturbed: {error}") from error
        await asyncio.sleep(_PERIOD_S)


@promise("python3", time_s=90)
async def memory_limit_ends_a_program(trial: PromiseTrial) -> None:
    """A program that uses more memory than the sandbox has is ended, the result says so, and the sandbox continues."""
    one = await trial.start(limits=_SMALL)
    async with undisturbed(trial):
        names(await one.exec(["python3", "-c", _HOG], timeout_s=_ENDS_S), "memory")
    await goes_on(trial, one)


@promise("python3", time_s=90)
async def reserved_memory_is_not_counted(trial: PromiseTrial) -> None:
    """A program may map much more than the memory limit, like race detectors and virtual machines, if it uses little.

    `MAP_NORESERVE` is 0x4000.
    """
    one = await trial.start(limits=_SMALL)
    code = "import mmap\nm = mmap.mmap(-1, 1 << 40, flags=0x4000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nm[7] = 1"
    result = await one.exec(["python3", "-c", f"{code}; print('mapped')"], timeout_s=_ENDS_S)
    same((result.code, result.stdout, result.limit), (0, b"mapped\n", ""), "what comes of a terabyte that is not used")


@promise("python3", time_s=90)
async def memory_limit_ends_many_small_programs(trial: PromiseTrial) -> None:
    """Programs that use too much memory together are ended like a single one."""
    one = await trial.start(limits=_SMALL)
    hog = "import time; held = b'x' * 40_000_000; time.sleep(100)"
    script = f'for n in {{1..15}}; do python3 -c "{hog}" & done; wait'
    async with undisturbed(trial):
        names(await trial.bash(script, one, _ENDS_S), "memory")
    await goes_on(trial, one)


@promise("python3", time_s=90)
async def memory_cannot_be_hidden(trial: PromiseTrial) -> None:
    """Memory that no process has mapped, as in memory files and /dev/shm, counts like any other."""
    one = await trial.start(limits=_SMALL)
    code = "import os\nnumber = os.memfd_create('x')\nwhile True: os.write(number, bytes(5_000_000))"
    for script in (f'python3 -c "{code}"', "head -c 2000000000 /dev/zero > /dev/shm/big"):
        names(await trial.bash(script, one, _ENDS_S), "memory", "space")
        await trial.bash("rm -f /dev/shm/big", one)
        await goes_on(trial, one)


@promise("python3", time_s=180)
async def socket_buffers_are_counted(trial: PromiseTrial) -> None:
    """Data waiting in sockets of every family counts as memory, even in sockets that are in flight in messages."""
    one = await trial.start(limits=_TIGHT)
    for kind in ("unix", "in flight", "tcp", "udp", "netlink"):
        names(await one.exec(["python3", "-c", program("fill_sockets"), kind], timeout_s=_ENDS_S), "memory")
        await goes_on(trial, one)


@promise("python3", time_s=90)
async def little_memory_is_left_behind(trial: PromiseTrial) -> None:
    """System V memory, semaphores and messages without a process never exceed the memory limit."""
    one = await trial.start(limits=_TIGHT)
    result = await one.exec(["python3", "-c", program("leave_ipc_objects")], timeout_s=60)
    if result.limit:
        names(result, "memory")
    else:
        assert int(result.stdout) < _TIGHT.memory_mb, f"{int(result.stdout)} MB are left by a program that has ended"
    await goes_on(trial, one)
    await trial.bash("for n in kernel/{shmall,sem,msgmni}; do echo 1000000 > /proc/sys/$n; done", one)
    again = await one.exec(["python3", "-c", program("leave_ipc_objects")], timeout_s=60)
    assert again.limit or int(again.stdout) < _TIGHT.memory_mb, f"once more, {again.stdout.decode()} MB are left"


@promise("python3", time_s=120)
async def shell_survives_the_memory_limit(trial: PromiseTrial) -> None:
    """A memory hog in a shell is ended, the result says so, and the shell takes the next command."""
    shell = await trial.shell(await trial.start(limits=_SMALL))
    await shell.run("cd /usr", 10)
    names(await shell.run(f'python3 -c "{_HOG}"', _ENDS_S), "memory")
    names(await shell.run("x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done", _ENDS_S), "memory", "allocate")
    same((await shell.run("pwd", 20)).output, "/usr\n", "what the next command says")


@promise("python3", time_s=120)
async def kernel_survives_the_memory_limit(trial: PromiseTrial) -> None:
    """A memory hog in a cell is ended, the result says so, and the kernel takes the next cell."""
    kernel = await trial.kernel(await trial.start(limits=_SMALL))
    result = await kernel.run(_HOG, _ENDS_S)
    names(result, "memory")
    assert result.error or result.restarted, f"the cell seems to have ended well: {result}"
    assert "2" in (await kernel.run("1 + 1", 20)).output, "the next cell does not run"


@promise(time_s=120)
async def process_limit_ends_a_fork_bomb(trial: PromiseTrial) -> None:
    """A fork bomb meets the process limit and is ended with its command; the result says so, the sandbox continues."""
    one = await trial.start(limits=_SMALL)
    async with undisturbed(trial):
        result = await trial.bash("f() { f | f & }; f; sleep 100", one, 3)
        text = described(result).lower()
        assert "fork" in text or "process" in text, f"nothing tells of processes: {short(text)}"
    await goes_on(trial, one)


@promise(time_s=120)
async def shell_survives_a_fork_bomb(trial: PromiseTrial) -> None:
    """A shell that started a fork bomb takes the next command, at the latest after its time limit."""
    one = await trial.start(limits=_SMALL)
    shell = await trial.shell(one)
    async with undisturbed(trial):
        await shell.run("f() { f | f & }; f; sleep 100", 3)

    async def takes_another() -> bool:
        return (await shell.run("/bin/echo fine", 10)).output == "fine\n"

    await eventually(takes_another, "the shell took another command", _ENDS_S)
    await goes_on(trial, one)


@promise(time_s=90)
async def processes_are_counted(trial: PromiseTrial) -> None:
    """The number of processes is limited exactly, independently of other sandboxes of the node."""
    limits = SandboxLimits(n_processes=60)
    one, two = await trial.start(limits=limits), await trial.start(limits=limits)
    many = f"for n in {{1..40}}; do sleep {trial.mark} >/dev/null 2>&1 & done; echo fine"
    for sandbox in (one, two):
        same(await trial.sh(many, sandbox), "fine\n", "what a command says that starts 40 of 60 processes")
    await trial.until_asleep(80)
    result = await trial.bash(many, one, 5)
    assert "esource temporarily unavailable" in described(result), (
        f"80 of 60 processes gave: {short(described(result))}"
    )


@promise(time_s=90)
async def disk_limit_ends_a_program(trial: PromiseTrial) -> None:
    """A program that writes more than the sandbox may is ended, the result says so, and its files can be removed."""
    one = await trial.start(limits=_SMALL)
    async with undisturbed(trial):
        names(await trial.bash("head -c 3000000000 /dev/zero > big; sleep 20", one, _ENDS_S), "disk", "space")
    await trial.bash("rm -f big", one)
    await goes_on(trial, one)
    same(await trial.sh("echo x > small; cat small", one), "x\n", "what a small file holds")


@promise(time_s=120)
async def many_small_files_count_as_disk(trial: PromiseTrial) -> None:
    """Many small files count together, wherever in the sandbox they are."""
    one = await trial.start(limits=_LITTLE_DISK)
    script = "mkdir -p /srv/many; cd /srv/many; data=$(printf 'x%.0s' {1..16000}); "
    script += "for ((n = 0;; n++)); do echo $data > $n; done"
    names(await trial.bash(script, one, 60), "disk", "space")
    await trial.bash("rm -rf /srv/many", one, 60)
    await goes_on(trial, one)


@promise("python3", time_s=300)
async def allocated_disk_is_counted(trial: PromiseTrial) -> None:
    """Space that is reserved, mapped, filled sparsely or below deeply nested folders counts like written data."""
    for how, code in _TAKE_DISK.items():
        one = await trial.start(limits=_LITTLE_DISK)
        code = f"import mmap, os, time\n{code}\ntime.sleep(40)\nprint('held')"
        result = await one.exec(["python3", "-c", code], timeout_s=90)
        assert b"held" not in result.stdout, f"70 of {_LITTLE_DISK.disk_mb} MB were held: {how}"
        # mapped pages may be in memory before they are on disk
        names(result, "disk", *(("memory",) if how == "mapped" else ()))
        await goes_on(trial, one)
        await one.stop()


@promise("python3")
async def holes_of_files_are_not_counted(trial: PromiseTrial) -> None:
    """A sparse file counts with its size on disk, not its length."""
    one = await trial.start(limits=_TIGHT)
    result = await trial.bash("truncate -s 3G sparse; for n in {1..20}; do echo $n >> log; sleep 0.1; done", one)
    same((result.code, result.limit), (0, ""), "how a command ends that makes a sparse file")


@promise("python3", time_s=180)
async def files_are_counted(trial: PromiseTrial) -> None:
    """Empty files, folders and links share a limit, because each takes an inode; beyond it a program gets a message."""
    one = await trial.start(limits=_TIGHT)
    code = "import os, time\nos.mkdir('many'); os.chdir('many'); open('x', 'w').close()\n"
    code += "for n in range(26000): os.link('x', str(n))\ntime.sleep(40)\nprint('held')"
    result = await one.exec(["python3", "-c", code], timeout_s=120)
    names(result, "files")
    await trial.bash("rm -rf many", one, 60)
    await goes_on(trial, one)


@promise(time_s=90)
async def open_removed_files_are_counted(trial: PromiseTrial) -> None:
    """Data of a deleted file counts until the file is closed."""
    one = await trial.start(limits=_SMALL)
    script = "exec 3> big; rm big; head -c 1000000000 /dev/zero >&3; sleep 20"
    names(await trial.bash(script, one, _ENDS_S), "disk", "space")
    await goes_on(trial, one)


@promise(time_s=90)
async def endless_output_is_ended(trial: PromiseTrial) -> None:
    """Endless output of commands, shells and cells is cut, and ends at the time limit with its beginning kept."""
    shell, kernel = await trial.shell(), await trial.kernel()
    for result in (
        await trial.bash("yes", timeout_s=1),
        await shell.run("yes", 1),
        await kernel.run("while True: print('y')", 1),
    ):
        same(result.timed_out, True, "whether it ended at its time limit")
        text = described(result)
        assert text.startswith("y\ny\n"), f"the output begins with {text[:10]!r}"
        assert len(text) < 50_000_000, f"{len(text)} bytes of output are kept"
    same((await shell.run("echo fine", 20)).output, "fine\n", "what the shell's next command says")
    assert "2" in (await kernel.run("1 + 1", 20)).output, "the next cell does not run"
    await trial.sh("echo fine")


@promise("python3")
async def open_files_are_counted(trial: PromiseTrial) -> None:
    """A program that opens more files than it may gets an error that names the reason."""
    one = await trial.start(limits=SandboxLimits(n_files=64))
    code = "import os\nheld = [os.open('/dev/null', os.O_RDONLY) for n in range(100)]"
    result = await one.exec(["python3", "-c", code], timeout_s=_ENDS_S)
    assert "Too many open files" in described(result), f"it says: {short(described(result))}"
    await goes_on(trial, one)


@promise()
async def cpu_time_is_counted(trial: PromiseTrial) -> None:
    """A program that uses more CPU time than it may is ended, and the result says so."""
    one = await trial.start(limits=SandboxLimits(cpu_s=1))
    result = await trial.bash("while :; do :; done", one, _ENDS_S)
    assert result.code not in (0, None), f"the exit code is {result.code}"
    names(result, "cpu")
    result = await trial.bash("bash -c 'while :; do :; done'; echo after", one, _ENDS_S)
    names(result, "cpu")
    assert b"after\n" in result.stdout, "the program that waited for it was ended too"
    await goes_on(trial, one)


@promise()
async def file_size_is_counted(trial: PromiseTrial) -> None:
    """No file grows beyond its limit: the writer is ended or gets an error, and the result says so."""
    one = await trial.start(limits=SandboxLimits(file_mb=10))
    result = await trial.bash("head -c 30000000 /dev/zero > big", one, _ENDS_S)
    assert result.code not in (0, None), f"the exit code is {result.code}"
    names(result, "file")
    size = int(await trial.sh("stat -c %s big", one))
    assert size <= 10 * 1024 * 1024, f"the file has {size} bytes"
    await goes_on(trial, one)


@promise()
async def a_command_can_have_lower_limits(trial: PromiseTrial) -> None:
    """Limits of a command apply only to it; those of shells and kernels are the sandbox's."""
    one = await trial.start(limits=SandboxLimits(cpu_s=1000, n_files=500, file_mb=100))
    show = ["bash", "-c", "ulimit -t; ulimit -n; ulimit -f; ulimit -c"]
    lower = await one.exec(show, timeout_s=10, limits=SandboxLimits(cpu_s=7, n_files=50, file_mb=3))
    same(lower.stdout, b"7\n50\n3072\n0\n", "CPU time, files, file size and core size with the command's limits")
    same((await one.exec(show, timeout_s=10)).stdout, b"1000\n500\n102400\n0\n", "those of the next command")
    shell = await trial.shell(one)
    same((await shell.run(show[-1], 10)).output, "1000\n500\n102400\n0\n", "those of a shell")
    kernel = await trial.kernel(one)
    same((await kernel.run(f"!{show[-1]}", 20)).output, "1000\n500\n102400\n0\n", "those of a kernel")
