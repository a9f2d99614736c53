"""The rules for changes of users and groups by a sandbox's processes: those of the kernel, which root can query."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.conftest import absent
from workers.sandboxes.isolation.owners.credentials import (
    LOCKS,
    UNCHANGED,
    Credentials,
    CredentialsTable,
    begin_as,
    of_user,
    shown,
)

ARGUMENTS = {"setuid": 1, "setgid": 1, "setreuid": 2, "setregid": 2, "setresuid": 3, "setresgid": 3}
ARGUMENTS |= {"setfsuid": 1, "setfsgid": 1}
IDS = (0, 33, 1500, 1501, UNCHANGED)
N_STEPS = 12

# performs the given steps, and after each prints the kernel's result
KERNEL = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for name, *arguments in json.loads(sys.argv[1]):
    try:
        if name == "setgroups":
            os.setgroups(arguments[0])
            code = 0
        else:
            result = getattr(libc, name)(*map(ctypes.c_uint, arguments))
            code = ctypes.get_errno() if result < 0 and "fs" not in name else 0
    except OSError as error:
        code = error.errno
    words = [line.split()[1:] for line in open("/proc/self/status") if line.startswith(("Uid:", "Gid:", "Groups:"))]
    print(json.dumps([code, *[list(map(int, each)) for each in words]]))
"""


def of_kernel(steps: Sequence[Sequence[object]]) -> list[list[object]]:
    done = subprocess.run([sys.executable, "-c", KERNEL, json.dumps(steps)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_implementation(steps: Sequence[Sequence[object]]) -> list[list[object]]:
    now, result = of_user(0, 0).with_others(()), []
    for name, *arguments in steps:
        code = 0
        try:
            if name == "setgroups":
                now = now.with_others(tuple(arguments[0]))  # type: ignore[arg-type]
            else:
                now = now.after(str(name), [int(each) for each in arguments])  # type: ignore[call-overload]
        except OSError as error:
            code = error.errno or 0
        result.append([code, list(now.users), list(now.groups), sorted(now.others)])
    return result


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_changes_has_the_results_of_the_kernel(seed: int) -> None:
    if os.geteuid() != 0:
        absent("an ordinary user cannot become others, so the kernel cannot be asked")
    drawn = random.Random(seed)
    steps: list[list[object]] = [["setgroups", []]]
    for _ in range(N_STEPS):
        if drawn.random() < 0.15:
            steps.append(["setgroups", sorted(drawn.sample([4, 33, 1500], drawn.randint(0, 2)))])
        else:
            name = drawn.choice(sorted(ARGUMENTS))
            steps.append([name, *(drawn.choice(IDS) for _ in range(ARGUMENTS[name]))])
    for step, ours, kernel in zip(steps, of_implementation(steps), of_kernel(steps), strict=True):
        assert ours == kernel, f"{step} in {steps}"


def test_process_that_dropped_root_cannot_regain_it_without_kept_capabilities() -> None:
    for name, wanted in (("setuid", 0), ("setgid", 7)):
        with pytest.raises(PermissionError):
            of_user(0, 0).after("setuid", [33]).after(name, [wanted])
    kept = of_user(0, 0).after_control(8, 1).after("setresuid", [33, 33, 33])
    assert kept.after("setresgid", [7, 7, 7]).groups == (7, 7, 7, 7)
    with pytest.raises(PermissionError):
        kept.after_exec(None, None).after("setgid", [7])
    with pytest.raises(OSError, match="change of ids") as error:
        of_user(0, 0).after("setuid", [UNCHANGED])
    assert error.value.errno == errno.EINVAL


def test_set_id_program_runs_with_the_ids_of_its_file() -> None:
    sudo = of_user(1500, 1600).after_exec(0, None)
    assert (sudo.users, sudo.groups, sudo.has_right) == ((1500, 0, 0, 0), (1600,) * 4, True)
    assert sudo.after("setuid", [0]).users == (0, 0, 0, 0)
    assert of_user(1500, 1600).after_exec(None, 42).groups == (1600, 42, 42, 42)


def test_files_are_given_away_by_root_and_by_owners_to_their_own_groups() -> None:
    user = Credentials((5,) * 4, (6,) * 4, (6, 7), has_right=False)
    given = {(uid, gid): user.may_give((5, 6), uid, gid) for uid in (5, 9, UNCHANGED) for gid in (6, 7, 8, UNCHANGED)}
    assert {ids for ids, allowed in given.items() if allowed} == {
        (uid, gid) for uid in (5, UNCHANGED) for gid in (6, 7, UNCHANGED)
    }
    assert not user.may_give((0, 0), UNCHANGED, 7)
    assert of_user(0, 0).may_give((5, 6), 9, 9)


def test_ids_are_inherited_by_fork_and_exec_and_dropped_with_the_process() -> None:
    table = CredentialsTable(of_user(0, 0))
    user = of_user(1500, 1600)
    child = subprocess.Popen(
        ["bash", "-c", "read; bash -c 'echo $$; read'; true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdin
        assert child.stdout
        assert (table.of(child.pid).users, shown(child.pid)) == ((0,) * 4, (0, 0))
        table.give(child.pid, user)
        child.stdin.write(b"\n")
        child.stdin.flush()
        grandchild = int(child.stdout.readline())
        table.give(child.pid, of_user(0, 0))
        assert table.of(grandchild).key() == user.key()
        assert (shown(grandchild), shown(child.pid)) == ((1500, 1600), (0, 0))
        child.stdin.write(b"\n\n")
    with pytest.raises(ProcessLookupError):
        table.of(child.pid)


def test_process_starts_with_the_first_ids_of_a_table() -> None:
    first = of_user(70_000, 5)
    child = os.fork()
    if child == 0:
        begin_as(first)
        fine = CredentialsTable(first).of(0).key() == first.key() and shown(0) is None
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert resource.prlimit(0, LOCKS)[0] == resource.RLIM_INFINITY
