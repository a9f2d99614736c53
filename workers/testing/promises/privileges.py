# ruff: noqa: ASYNC240, S108
# promises read the node's files where a moment does not matter, and name folders of the sandbox, not of ours
"""Promises about rights: root inside is nobody outside, and nothing that is done inside changes that."""

from __future__ import annotations

import json
from pathlib import Path

from workers.testing.promises.elsewhere import KEYS, elsewhere
from workers.testing.promises.expect import NotTried, same
from workers.testing.promises.promise import promise
from workers.testing.promises.trial import Trial

# name: number on x86-64, number on aarch64, arguments that do no harm where the call is allowed
_CALLS = {
    "mount": (165, 40, ["none", "/tmp", "tmpfs", 0, 0]),
    "move_mount": (429, 429, [-100, "/tmp", -100, "/tmp", 0]),
    "fsopen": (430, 430, ["tmpfs", 0]),
    "open_tree": (428, 428, [-100, "/tmp", 1]),
    "umount2": (166, 39, ["/proc", 2]),
    "pivot_root": (155, 41, ["/tmp", "/tmp"]),
    "init_module": (175, 105, [0, 0, ""]),
    "finit_module": (313, 273, [-1, "", 0]),
    "delete_module": (176, 106, ["promise", 0]),
    "kexec_load": (246, 104, [0, 0, 0, 0]),
    "swapon": (167, 224, ["/dev/null", 0]),
    "acct": (163, 89, ["/tmp"]),
    # ADJ_TICK, with a tick that no clock can have
    "adjtimex": (159, 171, ["\0@" + "\0" * 206]),
    "syslog": (103, 116, [3, 0, 0]),
    "unshare": (272, 97, [0x10000000]),
    # a child in a user namespace of its own, which ends at once
    "clone": (56, 220, [0x10000000 | 17, 0, 0, 0, 0]),
}
_TRY = """
import ctypes, errno, json, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
me = os.getpid()
for name, (*numbers, arguments) in json.loads(sys.argv[1]).items():
    values = [ctypes.c_long(one) if isinstance(one, int) else one.encode() for one in arguments]
    answer = libc.syscall(numbers[column], *values)
    if name == "clone" and answer == 0:
        os._exit(0)
    print(name, "allowed" if answer >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
"""
_REFUSALS = {"EPERM", "EACCES", "ENOSYS", "ENOSPC", "EUSERS"}
_REMOUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
REMOUNT, BIND, NOSUID, NODEV = 32, 4096, 2, 4
for line in open("/proc/self/mountinfo"):
    fields = line.split()
    target, options = fields[4].encode().decode("unicode_escape"), fields[5].split(",")
    if "ro" in options and libc.mount(None, target.encode(), None, REMOUNT | BIND | NOSUID | NODEV, None) == 0:
        print(target)
"""
_RAISE = """
import resource
for name in dir(resource):
    if name.startswith("RLIMIT_"):
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        try:
            if hard != resource.RLIM_INFINITY:
                resource.setrlimit(number, (hard + 1, hard + 1))
                print(name)
        except (ValueError, OSError):
            pass
"""


async def _refused(trial: Trial, *names: str) -> None:
    """Calls to the kernel by root of a sandbox of its own are refused for want of a right, whatever their arguments."""
    one = await trial.start()
    answers = await trial.python(_TRY, json.dumps({name: _CALLS[name] for name in names}), on=one)
    said = dict(line.split() for line in answers.splitlines())
    same(set(said), set(names), "the calls that were tried")
    allowed = {name: answer for name, answer in said.items() if answer not in _REFUSALS}
    assert not allowed, f"not refused: {', '.join(f'{name} ({answer})' for name, answer in allowed.items())}"


@promise("python3")
async def mounts_cannot_be_changed(trial: Trial) -> None:
    """Nothing inside can mount, unmount or move a file system, by the old calls or the new ones."""
    await _refused(trial, "mount", "move_mount", "fsopen", "open_tree", "umount2", "pivot_root")


@promise("python3")
async def what_is_read_only_stays_so(trial: Trial) -> None:
    """What is lent to a sandbox read-only, such as folders of the node, cannot be made writable inside."""
    same(await trial.python(_REMOUNT, on=await trial.start()), "", "what could be made writable")


@promise("python3")
async def the_kernel_cannot_be_changed(trial: Trial) -> None:
    """Nothing inside can load modules into the kernel, start another one, or change its swap, accounts and clock."""
    await _refused(trial, "init_module", "finit_module", "delete_module", "kexec_load", "swapon", "acct", "adjtimex")


@promise("python3")
async def the_kernels_log_is_closed(trial: Trial) -> None:
    """The log of the node's kernel cannot be read inside."""
    await _refused(trial, "syslog")


@promise("python3")
async def keys_of_the_worker_are_out_of_reach(trial: Trial) -> None:
    """What the worker has in the kernel's keyrings, such as Kerberos tickets, cannot be found inside."""
    async with elsewhere(trial, KEYS, trial.new_id()) as process:
        out, _ = await process.communicate()
    if out == b"no keys\n":
        raise NotTried("this machine's kernel keeps no keys for us")
    same(out, b"found:\n", "where the worker's key is found inside")


@promise("python3")
async def user_namespaces_are_not_nested(trial: Trial) -> None:
    """Nothing inside can make a user namespace, in which it would have all the rights again."""
    await _refused(trial, "unshare", "clone")


@promise("python3")
async def no_device_can_be_made(trial: Trial) -> None:
    """Device files cannot be made, neither of disks nor of memory."""
    code = """
import os, stat
for kind, number in ((stat.S_IFBLK, (7, 0)), (stat.S_IFBLK, (8, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (1, 11))):
    try:
        os.mknod("device", 0o600 | kind, os.makedev(*number))
        print(number)
    except PermissionError:
        pass
"""
    same(await trial.python(code, on=await trial.start()), "", "devices that were made")


@promise("python3")
async def limits_cannot_be_raised(trial: Trial) -> None:
    """No hard limit of a process can be raised inside."""
    same(await trial.python(_RAISE), "", "limits that were raised")


@promise()
async def root_inside_is_nobody_outside(trial: Trial) -> None:
    """Commands inside are root to themselves; on the node they are an ordinary user's, and not its root's."""
    same(await trial.sh("id -u"), "0\n", "the user id inside")
    one = await trial.start()
    await trial.sh(f"sleep {trial.mark} >/dev/null 2>&1 &", one)
    await trial.until_asleep()
    for pid in trial.sleepers():
        status = Path(f"/proc/{pid}/status").read_text()
        users = {line.split()[1] for line in status.splitlines() if line.startswith(("Uid:", "Gid:"))}
        assert "0" not in users, "on the node it is root's"


@promise()
async def no_program_gains_rights(trial: Trial) -> None:
    """Set-uid programs give nobody more rights: every process inside, the first one too, is kept from gaining any."""
    shell, kernel = await trial.shell(), await trial.kernel()
    grep = "grep -h NoNewPrivs /proc/self/status /proc/1/status | cut -f 2 | uniq"
    same(await trial.sh(grep), "1\n", "the mark of commands and the first process")
    same((await shell.run(grep, 10)).output, "1\n", "the mark of a shell")
    same((await kernel.run(f"import os; _ = os.system({grep!r})", 20)).output, "1\n", "the mark of a kernel")


@promise()
async def everyone_inside_can_be_killed_and_nobody_else(trial: Trial) -> None:
    """`kill -9 -1` inside harms no other sandbox and no process of the node, and the sandbox itself goes on."""
    one, two = await trial.start(), await trial.start()
    await trial.sh(f"sleep {trial.mark} >/dev/null 2>&1 &", two)
    await trial.until_asleep()
    shell = await trial.shell(one)
    await trial.bash("trap '' TERM; kill -TERM -1; kill -9 -1", one)
    await trial.bash("kill -9 1; kill -TERM 1; kill -INT 1", one)
    same(await trial.sh("echo fine", one), "fine\n", "what the next command prints")
    same((await shell.run("true", 20)).restarted, True, "whether the shell is told to have ended")
    same((await shell.run("echo fine", 20)).output, "fine\n", "what a shell prints that was killed")
    assert trial.sleepers(), "a process of another sandbox was killed"
    await trial.sh("echo fine", two)


@promise()
async def the_way_in_is_not_the_way_out(trial: Trial) -> None:
    """No process inside has its root, folder or a descriptor in the node's file system, whoever started it."""
    shell, kernel = await trial.shell(), await trial.kernel()
    await shell.run("true", 10)
    await kernel.run("1", 20)
    script = (
        f"for p in /proc/[0-9]*; do for w in $p/root $p/cwd $p/fd/*; do test -e $w{trial.folder} && echo $w; done; done"
    )
    same(await trial.sh(f"{script}; true"), "", "ways to the node's files")
