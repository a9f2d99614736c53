"""Promises about rights: root inside has no rights outside, and no action inside changes that."""

from __future__ import annotations

import json
from pathlib import Path

from workers.conformance.trial import NotTried, PromiseTrial, elsewhere, program, promise, same

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
    # ADJ_TICK, with an invalid tick
    "adjtimex": (159, 171, ["\0@" + "\0" * 206]),
    "syslog": (103, 116, [3, 0, 0]),
    "unshare": (272, 97, [0x10000000]),
    # a child in its own user namespace, which ends immediately
    "clone": (56, 220, [0x10000000 | 17, 0, 0, 0, 0]),
    "clone3": (435, 435, ["\0" * 64, 64]),
    "setns": (308, 268, [-1, 0]),
    "mount_setattr": (442, 442, [-100, "/tmp", 0, "\0" * 32, 32]),
    "open_tree_attr": (467, 467, [-100, "/tmp", 0, 0, 0]),
    "kexec_file_load": (320, 294, [-1, -1, 0, "", 0]),
    "swapoff": (168, 225, ["/dev/null"]),
    "reboot": (169, 142, [0, 0, 0, 0]),
    "settimeofday": (164, 170, [0, 0]),
    "clock_settime": (227, 112, [0, 0]),
    "clock_adjtime": (305, 266, [0, "\0" * 208]),
    "quotactl": (179, 60, [0, 0, 0, 0]),
    "io_uring_setup": (425, 425, [1, "\0" * 120]),
    "io_uring_enter": (426, 426, [-1, 0, 0, 0, 0, 0]),
    "io_uring_register": (427, 427, [-1, 0, 0, 0]),
    "io_setup": (206, 0, [1, "\0" * 8]),
    "bpf": (321, 280, [0, "\0" * 72, 72]),
    "perf_event_open": (298, 241, ["\0" * 112, 0, -1, -1, 0]),
    # UFFD_USER_MODE_ONLY
    "userfaultfd": (323, 282, [1]),
    "memfd_secret": (447, 447, [0]),
    "add_key": (248, 217, ["user", "promise", "x", 1, -3]),
    "request_key": (249, 218, ["user", "promise", 0, 0]),
    "keyctl": (250, 219, [0, -3, 0, 0, 0]),
    "pidfd_getfd": (438, 438, [-1, 0, 0]),
    "process_vm_readv": (310, 270, [1, 0, 0, 0, 0, 0]),
    "process_vm_writev": (311, 271, [1, 0, 0, 0, 0, 0]),
    "kcmp": (312, 272, [1, 1, 1, 0, 0]),
    "name_to_handle_at": (303, 264, [-100, "/tmp", "\0" * 136, "\0" * 4, 0]),
    "open_by_handle_at": (304, 265, [-100, "\0" * 8, 0]),
    "fanotify_init": (300, 262, [0, 0]),
    "lookup_dcookie": (212, 18, [0, "", 0]),
    "move_pages": (279, 239, [0, 0, 0, 0, 0, 0]),
    "not_yet_known": (1000, 1000, [0]),
}
_REFUSALS = {"EPERM", "EACCES", "ENOSYS", "ENOSPC", "EUSERS"}


async def _refused(trial: PromiseTrial, *names: str) -> None:
    answers = await trial.python(
        program("try_system_calls"), json.dumps({name: _CALLS[name] for name in names}), on=await trial.start()
    )
    results = dict(line.split() for line in answers.splitlines())
    same(set(results), set(names), "the calls that were tried")
    allowed = {name: answer for name, answer in results.items() if answer not in _REFUSALS}
    assert not allowed, f"not refused: {', '.join(f'{name} ({answer})' for name, answer in allowed.items())}"


@promise("python3")
async def mounts_cannot_be_changed(trial: PromiseTrial) -> None:
    """No process inside can mount, unmount or move a file system, with the old calls or the new ones."""
    await _refused(trial, "mount", "move_mount", "fsopen", "open_tree", "umount2", "pivot_root", "mount_setattr")
    await _refused(trial, "open_tree_attr")


@promise("python3")
async def read_only_files_stay_read_only(trial: PromiseTrial) -> None:
    """Read-only mounts of a sandbox, such as folders of the node, cannot be made writable inside."""
    same(await trial.python(program("remount_writable"), on=await trial.start()), "", "what could be made writable")


@promise("python3")
async def the_kernel_cannot_be_changed(trial: PromiseTrial) -> None:
    """No process inside can load kernel modules, start another kernel, or change its swap, accounting and clock."""
    await _refused(trial, "init_module", "finit_module", "delete_module", "kexec_load", "swapon", "acct", "adjtimex")
    await _refused(trial, "kexec_file_load", "swapoff", "reboot", "settimeofday", "clock_settime", "clock_adjtime")
    await _refused(trial, "quotactl")


@promise("python3")
async def unneeded_system_calls_are_refused(trial: PromiseTrial) -> None:
    """Calls that expose much of the kernel and that usual programs do not need are refused, and so are new ones."""
    await _refused(trial, "io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "bpf", "userfaultfd")
    await _refused(trial, "perf_event_open", "memfd_secret", "name_to_handle_at", "open_by_handle_at", "fanotify_init")
    await _refused(trial, "lookup_dcookie", "move_pages", "not_yet_known")


@promise("python3")
async def first_process_cannot_be_inspected(trial: PromiseTrial) -> None:
    """Process 1, which holds the sandbox, cannot be traced, and its memory, files and variables cannot be read."""
    one = await trial.start()
    await _refused(trial, "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp")
    same(await trial.python(program("look_into_first_process"), on=one), "", "ways into the first process")
    await trial.sh("echo fine", one)


@promise("python3")
async def programs_can_be_debugged(trial: PromiseTrial) -> None:
    """A program inside may trace its own children, as debuggers do."""
    same(await trial.python(program("trace_child")), "traced\n", "what a program says that traces its child")


@promise("python3")
async def kernel_log_is_unreadable(trial: PromiseTrial) -> None:
    """The log of the node's kernel cannot be read inside."""
    await _refused(trial, "syslog")


@promise("python3")
async def kernel_keys_of_the_worker_are_unreachable(trial: PromiseTrial) -> None:
    """Keys of the worker in the kernel's keyrings, such as Kerberos tickets, cannot be found inside."""
    async with elsewhere(trial, "keys", trial.new_id()) as process:
        out, _ = await process.communicate()
    if out == b"no keys\n":
        raise NotTried("the kernel of this machine keeps no keys for this user")
    same(out, b"found:\n", "where the worker's key is found inside")
    await _refused(trial, "add_key", "request_key", "keyctl")


@promise("python3")
async def user_namespaces_are_not_nested(trial: PromiseTrial) -> None:
    """No process inside can create a user namespace, in which it would have all the rights again."""
    await _refused(trial, "unshare", "clone", "clone3", "setns")


@promise("python3")
async def no_device_can_be_made(trial: PromiseTrial) -> None:
    """Device files cannot be created, neither of disks nor of memory."""
    same(await trial.python(program("make_devices"), on=await trial.start()), "", "devices that were made")


@promise("python3")
async def limits_cannot_be_raised(trial: PromiseTrial) -> None:
    """No hard limit of a process can be raised inside."""
    same(await trial.python(program("raise_limits")), "", "limits that were raised")


@promise()
async def root_has_no_rights_outside(trial: PromiseTrial) -> None:
    """Commands inside are root there; on the node they belong to an ordinary user."""
    same(await trial.sh("id -u"), "0\n", "the user id inside")
    await trial.sh(f"sleep {trial.mark} >/dev/null 2>&1 &", await trial.start())
    await trial.until_asleep()
    for pid in trial.sleepers():
        status = Path(f"/proc/{pid}/status").read_text()
        users = {line.split()[1] for line in status.splitlines() if line.startswith(("Uid:", "Gid:"))}
        assert "0" not in users, "on the node it is root's"


@promise()
async def no_program_gains_rights(trial: PromiseTrial) -> None:
    """Set-uid programs give no process more rights: no process inside, even the first, can gain any."""
    shell, kernel = await trial.shell(), await trial.kernel()
    grep = "grep -h NoNewPrivs /proc/self/status /proc/1/status | cut -f 2 | uniq"
    same(await trial.sh(grep), "1\n", "the mark of commands and the first process")
    same((await shell.run(grep, 10)).output, "1\n", "the mark of a shell")
    same((await kernel.run(f"import os; _ = os.system({grep!r})", 20)).output, "1\n", "the mark of a kernel")


@promise()
async def kill_reaches_only_processes_inside(trial: PromiseTrial) -> None:
    """`kill -9 -1` inside harms no other sandbox and no process of the node, and the sandbox itself continues."""
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
async def entry_descriptors_are_closed(trial: PromiseTrial) -> None:
    """No process inside has its root, folder or a descriptor in the node's file system, whatever started it."""
    shell, kernel = await trial.shell(), await trial.kernel()
    await shell.run("true", 10)
    await kernel.run("1", 20)
    script = (
        f"for p in /proc/[0-9]*; do for w in $p/root $p/cwd $p/fd/*; do test -e $w{trial.folder} && echo $w; done; done"
    )
    same(await trial.sh(f"{script}; true"), "", "ways to the node's files")
