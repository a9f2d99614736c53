"""Owners of files in Dockerfile images and of a policy's files: several, though the kernel knows only one user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.scratch_folder import sandbox_config
from tests.services.farms import until
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.images.image import set_alias
from workers.sandboxes.isolation.owners.file_owners import ATTRIBUTE
from workers.sandboxes.optional_protocols import keeps_layers

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]

# a static program, which ignores preloaded libraries
STATIC = r"""
#include <stdio.h>
#include <sys/stat.h>
int main(int n, char **names) {
  struct stat status;
  for (int i = 1; i < n; i++) {
    if (lstat(names[i], &status)) { perror(names[i]); return 1; }
    printf("%u:%u\n", status.st_uid, status.st_gid);
  }
  return 0;
}
"""

DOCKERFILE = """\
FROM debian:owners
RUN mkdir -p /own/tree /app && touch /own/tree/a /own/b /own/plain && ln -s plain /own/link \\
  && chown -R 1500:1600 /own/tree && chown 33 /own/b && chgrp 44 /own/b && chown -h 7:7 /own/link
RUN cp -a /own/tree /copied && cd /own && chown --reference=b tree/a && chown 0 b
COPY --chown=1500:1500 here/ /app/
COPY here/f /app/g
RUN echo more >>/app/f; test "$(stat -c %u /app/f)" = 1500
USER 1500:1500
WORKDIR /app/made
RUN touch mine && mkdir below && ! chown 9:9 mine && [ -O mine ] && ! [ -O /own/plain ]
USER root
WORKDIR /
"""
FILES = "/own /own/tree /own/tree/a /own/b /own/plain /own/link /copied /copied/a /app /app/f /app/g /app/made"
FILES += " /app/made/mine /app/made/below /etc"
OWNERS = "0:0 1500:1600 33:44 0:44 0:0 0:0 1500:1600 1500:1600 0:0 1500:1500 0:0 1500:1500 1500:1500 1500:1500"
OWNERS += " 0:0"


@pytest.fixture
def name(sandbox_settings: None, tmp_path: Path) -> str:
    """Return a build context whose image has files of several owners."""
    set_alias(sandbox_config(), "debian:owners", "host")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/f").write_text("f\n")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return f"dockerfile:{tmp_path}"


def output_of(run: Run, sandbox: Sandbox, script: str) -> str:
    result = run(sandbox.exec(["bash", "-c", script], timeout_s=60))
    assert (result.stderr, result.code) == (b"", 0)
    return str(result.stdout.decode())


def test_owners_of_an_image_are_shown_to_all_programs(start: Start, run: Run, name: str, tmp_path: Path) -> None:
    sandbox = start(image=name)
    # by statx, by newfstatat, and by descriptor
    shown = ["stat -c %u:%g", "find -maxdepth 0 -printf '%U:%G\\n'"]
    listed = [
        "python3 -c 'import os, sys; [print(\"%d:%d\" % (s.st_uid, s.st_gid)) for s in map(os.lstat, sys.argv[1:])]'"
    ]
    if compiler := shutil.which("gcc"):
        subprocess.run([compiler, "-static", "-x", "c", "-", "-o", tmp_path / "static"], input=STATIC, text=True)
        if (tmp_path / "static").exists():
            run(sandbox.upload(tmp_path / "static", "/static"))
            listed.append("/static")
    for program in (shown[0], *listed):
        assert output_of(run, sandbox, f"{program} {FILES}").split() == OWNERS.split(), program
    opened = 'import os; s = os.fstat(os.open("/app/f", 0)); t = os.stat("f", dir_fd=os.open("/app", 0)); '
    opened += (
        'os.chdir("/own"); print(s.st_uid, t.st_gid, os.stat("tree/../b").st_gid, s.st_size, os.stat("link").st_uid)'
    )
    assert output_of(run, sandbox, f"python3 -c '{opened}'") == "1500 1500 44 7 0\n"
    # the kernel's own answers for missing files and for objects that are no files
    assert output_of(run, sandbox, "stat /none 2>&1; stat '' 2>&1; true | stat -c %F -").splitlines() == [
        "stat: cannot statx '/none': No such file or directory",
        "stat: cannot statx '': No such file or directory",
        "fifo",
    ]
    threads = 'import os, threading as t; r = []; f = lambda: r.extend(os.stat("/app/f").st_uid for _ in range(50)); '
    threads += "a = [t.Thread(target=f) for _ in range(8)]; [x.start() for x in a]; [x.join() for x in a]; "
    threads += "print(len(r), set(r))"
    assert output_of(run, sandbox, f"python3 -c '{threads}'") == "400 {1500}\n"


def test_owner_changes_last_as_long_as_the_file(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name)
    script = (
        "cd /own; chown 5:6 plain; cp -p plain other; mv plain moved; tar c moved b | tar xp -C /app; echo x >>moved; "
    )
    script += "chown 0 tree; chown 8 none 2>/dev/null; echo $?; (sleep 0.1; chown 3:3 late) & touch late; wait; "
    script += "stat -c %u:%g moved other /app/moved /app/b tree late"
    assert output_of(run, sandbox, script).split() == ["1", "5:6", "5:6", "5:6", "0:44", "0:1600", "3:3"]
    shell = run(sandbox.open_shell())
    assert run(shell.run("stat -c %u /app/f; chown 4 /app/f; stat -c %u /app/f", timeout_s=20)).output.split() == [
        "1500",
        "4",
    ]
    kernel = run(sandbox.open_kernel())
    assert "4 4" in run(kernel.run("import os; print(os.stat('/app/f').st_uid, 4)", timeout_s=20)).output
    run(sandbox.stop())


def test_new_files_inherit_the_group_of_a_set_group_id_folder(start: Start, run: Run, name: str) -> None:
    made = "import os, sys; os.setresgid(*[1500] * 3); os.setresuid(*[1500] * 3); os.chdir('/shared'); "
    made += "os.mkdir('d'); open('f', 'w'); open('/shared/d/deep', 'w'); open('/plain/f', 'w')"
    script = "mkdir -m 777 /shared /plain; chown 7:44 /shared; chmod 2777 /shared; "
    script += f'python3 -c "{made}"; stat -c "%u:%g %a" /shared/d /shared/f /shared/d/deep /plain/f'
    owners = ["1500:44 2755", "1500:44 644", "1500:44 644", "1500:1500 644"]
    assert output_of(run, start(image=name), script).splitlines() == owners


def test_owner_change_clears_set_id_bits_as_the_kernel_does(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name)
    changes = [
        ("chown 5:6", 0o4755, 0o755),
        ("chown :6", 0o6755, 0o755),
        ("chown 5", 0o2745, 0o2745),
        ("chown 5", 0o6644, 0o2644),
        ("chown -h 5", 0o4700, 0o700),
    ]
    script = "".join(f"touch /f; chmod {mode:o} /f; {change} /f; stat -c %a /f; rm /f; " for change, mode, _ in changes)
    script += "mkdir /d; chmod 6755 /d; chown 5:6 /d; stat -c %a /d; touch /g; chown 5 /g; chmod 4755 /g; stat -c %a /g"
    assert output_of(run, sandbox, script).split() == [*(f"{left:o}" for _, _, left in changes), "6755", "4755"]


def test_files_of_a_non_root_policy_keep_their_owner(
    start: Start, run: Run, provider: SandboxProvider, name: str
) -> None:
    sandbox = start(image=name, user="1500:1500")
    pretended = (
        f'import os; os.setxattr("/app/new", "{ATTRIBUTE}", b"0:0"); os.setxattr("/app/g", "{ATTRIBUTE}", b"9:9")'
    )
    output_of(
        run, sandbox, f"mkdir /app/dir; touch /app/new /app/dir/deep; echo more >>/app/f; python3 -c '{pretended}'"
    )
    output_of(run, sandbox, "chmod 0 /app/dir; rm -r /own/tree; mkdir /own/tree; ln -s / /app/link; mkfifo /app/fifo")
    # a program sees its own pretence, and nobody else does
    assert output_of(run, sandbox, "id -u; stat -c %u:%g /app/f /app/new").split() == ["1500", "1500:1500", "0:0"]
    keeper = keeps_layers(provider)
    assert keeper
    layer = f"left-owners-{provider.kind}-{os.getpid()}"
    run(keeper.stop_keeping(sandbox, layer))
    spec = sandbox._spec.model_copy(update={"user": "root"})  # type: ignore[attr-defined]
    other = run(keeper.start_on(f"{sandbox.sandbox_id}-verifier", spec, layer))
    try:
        paths = "/app/f /app/g /app/new /app/dir /app/dir/deep /own/tree /own /app/made/mine /app/link"
        owners = "1500:1500 0:0 1500:1500 1500:1500 1500:1500 1500:1600 0:0 1500:1500 0:0"
        assert output_of(run, other, f"stat -c %u:%g {paths}").split() == owners.split()
    finally:
        run(other.stop())
    until(lambda: not other.alive(), "the second has ended")


def test_killed_owner_process_affects_no_other_program(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name)
    shell = run(sandbox.open_shell())
    for script in ("kill -9 -1", "kill -STOP -1", "pkill -9 farm-owners", "kill -9 $(pgrep farm-owners)"):
        run(shell.run(f"sleep 600 & {script}", timeout_s=20))
        assert run(shell.run("stat -c %u /app/f", timeout_s=20)).output.split()[0] == "1500", script
    assert run(shell.run("kill -9 -1; sleep 0.2; pgrep -c sleep", timeout_s=20)).output.split()[-1] == "0"
    run(shell.close())
    assert output_of(run, sandbox, "stat -c %u /app/f") == "1500\n"
    # its answer cannot be inspected, and goes away with it
    looked = "for each in /proc/[0-9]*; do grep -q '^CapEff:.*0000000000a80425fb' $each/status 2>/dev/null; done; "
    looked += "cat /proc/*/mem 2>&1 >/dev/null | grep -c denied; true"
    assert int(output_of(run, sandbox, looked)) >= 1
    until(lambda: _n_processes(run, sandbox) <= 3, "none is left of those that showed owners")


def test_owner_process_survives_calls_attributes_and_signals(start: Start, run: Run, name: str) -> None:
    sandbox = start(image=name)
    shown = "stat -c %u /app/f"
    signals = "trap '' TERM HUP INT USR1 USR2 ALRM; for each in TERM HUP INT USR1 USR2 ALRM; do kill -$each -1; done"
    named = "for each in /proc/[0-9]*; do tr '\\0' ' ' <$each/cmdline; cat $each/comm; done | grep -c '[p]ython'"
    for value in ("99999999999999:5", "-5:5", "4294967295:0", "5:5:5", "x"):
        forged = f"import os; os.setxattr('/own/tree/a', '{ATTRIBUTE}', b'{value}')"
        assert output_of(run, sandbox, f'python3 -c "{forged}"; stat -c %u /own/tree/a; {shown}') == "0\n1500\n", value
    assert output_of(run, sandbox, f"{signals}; {shown}; {named} || true") == "1500\n0\n"
    calls = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.chdir("/own/tree")
for wrong in (2**64 - 1, 2**63, 1):
    for name in (b"/app/f", ctypes.c_void_p(wrong)):
        assert libc.statx(-100, name, 0, 0x7FF, ctypes.c_void_p(wrong)) == -1 and ctypes.get_errno() == 14
    assert libc.chown(ctypes.c_void_p(wrong), 1, 1) == -1 and ctypes.get_errno() == 14
for closed in (-1, 99):
    assert libc.fchown(closed, 7, 7) == -1 and ctypes.get_errno() == 9
    assert libc.fchownat(closed, b"a", 7, 7, 0) == -1 and ctypes.get_errno() == 9
    try:
        os.fstat(closed)
    except OSError as error:
        assert error.errno == 9
    else:
        raise AssertionError
print(os.stat(".").st_uid, os.stat("/app/f").st_uid)
"""
    run(sandbox.write_file("/calls.py", calls.encode()))
    assert output_of(run, sandbox, "python3 /calls.py") == "1500 1500\n"
    assert output_of(
        run, sandbox, "mkdir /devel /system; chown 5:6 /devel /system; stat -c %u:%g /devel /system"
    ).split() == [
        "5:6",
        "5:6",
    ]


def _n_processes(run: Run, sandbox: Sandbox) -> int:
    return len(output_of(run, sandbox, "echo /proc/[0-9]*").split())
