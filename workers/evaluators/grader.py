"""The grader process: scores answers with the verifiers of reasoning-gym, one JSON line in, one out.

Verifiers get a process of their own because they hang, use signals, and some `eval` the policy's text. So before the
first answer the process gives up root, its network, and, by an audit hook, other processes, sockets and writing files;
memory is limited. It ends when its parent does.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "ctypes.",
    "pty.",
    "shutil.",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.kill",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.putenv",
    "signal.pthread_kill",
    "sys.addaudithook",
)
"""Audit events, by their beginnings, that no verifier needs."""


def main(user: str) -> None:
    answers = _private_stdout()
    import reasoning_gym  # noqa: F401  (registers the families; costs a second, which the first answer need not pay)

    _confine(user)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), file=answers, flush=True)


def _private_stdout() -> IO[str]:
    """The parent's pipe, out of reach of verifiers that print."""
    private = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    return private


def _confine(user: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:
        account = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    # Where user namespaces are forbidden the audit hook alone keeps verifiers off the network.
    libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # After the change of user, which clears it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED) or (event == "open" and _writes(*arguments[1:3])):
        raise PermissionError(f"{event} is not allowed in a verifier")


def _writes(mode: str | None, flags: int | None) -> bool:
    return bool(set(mode or "") & set("wax+") or (flags or 0) & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC))


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        score = float(_scorer(request["family"])(request["answer"], request["entry"]))
    except MemoryError:
        return {"error": "MemoryError"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"score": score}


@cache
def _scorer(family: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(family)
    return scorer


def command(user: str) -> list[str]:
    """How the grader is started; `user` is whom it becomes when started by root."""
    # until it has set this itself, which takes it a second
    bound = ["setpriv", "--pdeathsig", "KILL", "--"]
    return [*bound, sys.executable, "-I", "-m", __name__, user]


def environment() -> dict[str, str]:
    """All a verifier may see of ours: none of the farm's settings and keys."""
    folder = str(Path(sys.executable).parent)
    return {"PATH": f"{folder}:/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main(sys.argv[1])
