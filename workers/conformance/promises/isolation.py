"""Promises about everything hidden inside: the node's files, people, environment, processes and devices."""

from __future__ import annotations

import getpass
import os
import pwd
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.conformance import outside
from workers.conformance.trial import NotTried, PromiseTrial, promise, same
from workers.plugins.interfaces import Sandbox

_EVERYWHERE = (
    "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/task/*/environ 2>/dev/null | tr '\\0' '\\n'; true"
)
# reads the text to search for from its input, so that it does not find itself
_PROCESSES_WITH = """
read -r text; for file in /proc/[0-9]*/cmdline; do
    { line=$(tr '\\0' ' ' < "$file"); } 2>/dev/null; [[ $line == *"$text"* ]] && echo "$line"
done; true
"""
_MEMORY, _TERMINALS, _PTS = 1, 5, range(136, 144)
_HARMLESS = {(_MEMORY, minor) for minor in (3, 5, 7, 8, 9)} | {(_TERMINALS, minor) for minor in (0, 1, 2)}
"""Major and minor numbers of null, zero, full, random, urandom, tty, console and ptmx."""


@contextmanager
def _in_the_environment(**variables: str) -> Iterator[None]:
    """Set variables of this process, which is the worker, while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@promise()
async def worker_secrets_are_not_visible(trial: PromiseTrial) -> None:
    """A variable of the worker's environment is in no process inside: commands, shells, kernels, the first process."""
    secret = secrets.token_hex(16)
    with _in_the_environment(FARM_POLICY_KEY=secret, AWS_SECRET_ACCESS_KEY=secret, OPENAI_API_KEY=secret):
        one = await trial.start()
        shell, kernel = await trial.shell(one), await trial.kernel(one)
        seen = await trial.sh(_EVERYWHERE, one)
        seen += (await shell.run(f"export; set; {_EVERYWHERE}", 20)).output
        seen += (await kernel.run("import os; print(dict(os.environ))", 20)).output
    assert secret not in seen, "the secret can be read inside"
    assert "FARM_" not in seen, "a setting of the farm can be read inside"


@promise()
async def worker_environment_is_not_inherited(trial: PromiseTrial) -> None:
    """Environment variables inside have chosen values, not those of the worker."""
    with _in_the_environment(LC_ALL="worker", PYTHONPATH="/worker", LD_LIBRARY_PATH="/worker", BASH_ENV="/worker"):
        one = await trial.start(env={"CHOSEN": "yes"})
        seen = (await one.exec(["env"], timeout_s=10)).stdout.decode().splitlines()
    assert "CHOSEN=yes" in seen, f"the variable of the spec is not there: {seen}"
    assert not [line for line in seen if "/worker" in line or "=worker" in line], f"a variable was handed on: {seen}"
    usual = {"PATH", "HOME", "LANG", "SHELL"}
    own = {f"{name}={value}" for name, value in os.environ.items() if len(value) > 10 and name not in usual}
    assert not own & set(seen), f"of the worker's environment there is {own & set(seen)}"


@promise()
async def home_and_tmp_of_the_node_are_hidden(trial: PromiseTrial) -> None:
    """The home, temporary and working folders of the node are not visible; folders of the same name are different."""
    paths = {Path.home(), Path(tempfile.gettempdir()), Path.cwd(), Path("/home"), Path("/root"), Path("/var/tmp")}
    for path in sorted(path for path in paths if path.exists()):
        seen = (await trial.bash('stat -Lc %d:%i -- "$P"', env={"P": str(path)})).stdout.decode().strip()
        status = path.stat()
        assert seen != f"{status.st_dev}:{status.st_ino}", f"{path} of the node is there"
    (trial.folder / "of-the-node").write_text("secret")
    same(
        await trial.sh(f"cat {trial.folder}/of-the-node 2>/dev/null || true"), "", "a temporary file of the node inside"
    )


@promise()
async def users_of_the_node_are_hidden(trial: PromiseTrial) -> None:
    """Neither the node's password files nor the names of its people are visible, even with its system folders."""
    if trial.spec().image != "host":
        raise NotTried("the image has its own users")
    same(await trial.sh("cat /etc/shadow /etc/gshadow /etc/ssh/ssh_host_* 2>/dev/null | wc -c"), "0\n", "bytes of them")
    people = {user.pw_name for user in pwd.getpwall() if user.pw_uid >= 1000 and user.pw_name != "nobody"}
    if os.getuid() >= 1000:
        people.add(getpass.getuser())
    inside = {line.partition(":")[0] for line in (await trial.sh("cat /etc/passwd")).splitlines()}
    assert not people & inside, f"{people & inside} of the node are known inside"


@promise()
async def node_name_is_hidden(trial: PromiseTrial) -> None:
    """The host name is not the node's, and changing it inside changes nothing outside."""
    name = socket.gethostname()
    if name in {"localhost", "sandbox"}:
        raise NotTried(f"the node's name {name} is too common to search for")
    seen = await trial.sh("uname -n; cat /etc/hostname /proc/sys/kernel/hostname /etc/hosts 2>/dev/null || true")
    assert name not in seen.split(), f"the node's name is known inside: {seen}"
    await trial.bash("hostname promised || echo promised > /proc/sys/kernel/hostname")
    same(socket.gethostname(), name, "the node's name")


@promise()
async def processes_of_the_node_are_hidden(trial: PromiseTrial) -> None:
    """A sandbox sees its own processes and none of the node's, and its first process has pid 1."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()", trial.mark], stdin=subprocess.PIPE)
    try:
        same(await _seen(trial, trial.mark, trial.sandbox), "", "a process of the node inside")
        await trial.bash(f"kill -9 {bystander.pid}")
        same(bystander.poll(), None, "how a process of the node ended")
    finally:
        bystander.kill()
        bystander.communicate()
    numbers = (await trial.sh("cd /proc; echo [0-9]*")).split()
    assert "1" in numbers, f"no process is number 1: {numbers}"
    assert len(numbers) < 50, f"there are {len(numbers)} processes"


async def _seen(trial: PromiseTrial, text: str, on: Sandbox) -> str:
    return (await trial.bash(_PROCESSES_WITH, on, stdin=text.encode())).stdout.decode()


@promise()
async def namespaces_are_separate(trial: PromiseTrial) -> None:
    """A sandbox shares none of the node's namespaces except the time namespace."""
    ours = outside.namespaces_of("self")
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        inside = (await trial.sh(f"readlink /proc/self/ns/{name}")).strip()
        assert inside != ours[name], f"the {name} namespace is the node's"


@promise()
async def shared_memory_is_separate(trial: PromiseTrial) -> None:
    """The node's shared memory, by file or by System V key, is not visible inside."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix=f"p{trial.mark}"):
        same(
            await trial.sh(f"ls /dev/shm | grep p{trial.mark} || true"), "", "a file of the node's shared memory inside"
        )
    one = await trial.start()
    for kind in ("shm", "sem", "msg"):
        same(len((await trial.sh(f"cat /proc/sysvipc/{kind}", one)).splitlines()), 1, f"lines of /proc/sysvipc/{kind}")


@promise("flock")
async def locks_are_separate(trial: PromiseTrial) -> None:
    """A program's lock on a file of the image blocks no program in another sandbox."""
    one, two = await trial.start(), await trial.start()
    file = (await trial.sh("readlink -f $(command -v flock)", one)).strip()
    await trial.sh(f"flock {file} sleep {trial.mark} >/dev/null 2>&1 & until ! flock -n {file} true; do :; done", one)
    result = await trial.bash(f"flock -n {file} true", two)
    same(result.code, 0, f"the exit code of `flock -n {file}` while another sandbox holds such a lock")


@promise("find")
async def devices_are_harmless(trial: PromiseTrial) -> None:
    """/dev contains terminals, random numbers and the like, and no disk, memory or other hardware."""
    same(await trial.sh("find / -xdev -type b"), "", "block devices")
    for line in (await trial.sh("find /dev -type c -exec stat -c '%t %T %n' {} +")).splitlines():
        major, minor, name = line.split()
        number = int(major, 16), int(minor, 16)
        assert number in _HARMLESS or number[0] in _PTS, f"{name} is the device {number[0]}:{number[1]}"
    for name in ("null", "zero", "random", "urandom", "tty", "ptmx"):
        await trial.sh(f"test -c /dev/{name}")


@promise()
async def hardware_is_hidden(trial: PromiseTrial) -> None:
    """Disks, network cards and other hardware of the node are not listed in /sys."""
    seen = await trial.sh(
        "ls -d /sys/block/* /sys/class/net/* /sys/class/dmi/* /sys/bus/pci/devices/* 2>/dev/null || true"
    )
    assert set(seen.split()) <= {"/sys/class/net/lo"}, f"there are {seen.split()}"
    same(await trial.sh("head -c 1 /proc/kcore /proc/kmsg /dev/mem 2>/dev/null | wc -c"), "0\n", "memory of the node")


@promise()
async def kernel_settings_are_read_only(trial: PromiseTrial) -> None:
    """Settings of the node's kernel in /proc and /sys cannot be opened for writing."""
    script = """
        for file in /proc/sysrq-trigger /proc/sys/kernel/{core_pattern,modprobe,panic} /proc/sys/vm/swappiness \
                /proc/sys/fs/file-max /sys/kernel/mm/transparent_hugepage/enabled; do
            { : >> $file; } 2>/dev/null && echo $file
        done; true
    """
    same(await trial.sh(script), "", "what could be written")


@promise()
async def sandboxes_do_not_see_each_other(trial: PromiseTrial) -> None:
    """Files, processes and memory of one sandbox are not visible in another, even of the same node and user."""
    one, two = await trial.start(), await trial.start()
    await trial.sh(f"sleep {trial.mark} >/dev/null 2>&1 &", one)
    await trial.until_asleep()
    for folder in (".", "/tmp", "/dev/shm", "/run/farm", "/root", "/var/tmp"):
        await trial.sh(f"echo mine > {folder}/p{trial.mark}", one)
        same(await trial.sh(f"ls -A {folder} | grep p{trial.mark} || true", two), "", f"what is in {folder} of another")
    assert trial.mark in await _seen(trial, f"sleep {trial.mark}", one), "a sandbox does not see its own process"
    same(await _seen(trial, f"sleep {trial.mark}", two), "", "processes of another sandbox")
