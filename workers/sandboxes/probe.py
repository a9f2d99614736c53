"""Whether this node can run sandboxes at all: tried once per process, with the calls that a sandbox needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.owner import give, sandbox_user

PROGRAMS = ("bash", "setpriv", "unshare", "rm")
_SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
}
_N_TRIES = 3
_TIMEOUT_S = 60.0
_TRY = """
import os, sys
sys.path.append(sys.argv[1])
from workers.sandboxes import linux
os.chdir(sys.argv[2])
if len(sys.argv) > 3:
    os.setgroups([]); os.setgid(int(sys.argv[4])); os.setuid(int(sys.argv[3])); linux.let_others_look_in(True)
linux.become_root_of_a_new_user_namespace(linux.NEWNS)
linux.make_mounts_private()
linux.mount("overlay", "root", "overlay", 0, "userxattr,lowerdir=lower,upperdir=upper,workdir=work")
os.remove("root/folder/file"); os.rmdir("root/folder"); os.mkdir("root/folder")
linux.unshare(linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS)
if os.fork() == 0:
    linux.mount("proc", "root", "proc", 0)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@cache
def namespaces_missing() -> str:
    """Why sandboxes cannot be made here and how to mend that; empty if they can. Blocks for 50 ms, once."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {', '.join(missing)}: install bash, coreutils and util-linux"
    for switch, (off, mend) in _SWITCHES.items():
        path = Path("/proc/sys") / switch
        if path.exists() and path.read_text().strip() == off:
            return f"user namespaces are switched off: as root, {mend}"
    try:
        done = answer_of(_try)
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    complaint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"namespaces or overlayfs do not work for ordinary users (Linux 5.12 is needed): {complaint}"


Answer: TypeAlias = "subprocess.CompletedProcess[str]"


def answer_of(ask: Callable[[], Answer]) -> Answer:
    """What a program says that is run to see what this node can do.

    One that a signal ends, as when every process of a node is told to end, says nothing, and is asked again.
    """
    for _ in range(_N_TRIES):
        answer = ask()
        if answer.returncode >= 0:
            break
    return answer


def run(argv: Sequence[str]) -> Answer:
    """Run a program to its end. OSError, subprocess.TimeoutExpired."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd="/")


def _try() -> Answer:
    settings().scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings().scratch, ignore_cleanup_errors=True) as name:
        place = Path(name)
        for folder in ("lower/folder", "upper", "work", "root"):
            (place / folder).mkdir(parents=True)
        (place / "lower/folder/file").touch()
        give(place)
        user = sandbox_user() or ()
        done = run([sys.executable, "-I", "-S", "-c", _TRY, str(Path(__file__).parents[2]), name, *map(str, user)])
        # overlayfs leaves a folder that only its owner's root can enter
        shutil.rmtree(place / "work", onerror=lambda _, path, __: Path(path).chmod(0o700))
        return done
