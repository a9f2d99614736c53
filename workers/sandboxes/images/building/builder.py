"""Builds of images by the container runtime: one command in its own folder, with a time limit and its last lines.

spython's own `build` is not used: it returns a path whether or not it worked, drops the builder's output, and has
neither a time limit nor a way to end it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from farm.errors import ImageError, SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.runtime import client, own_folder, program, wrapper
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox_user import give, sandbox_user

BUILD_S = 3600.0
"""Time limit of a build, long enough for large images over slow networks."""
N_LINES = 8
"""Number of a failed build's last lines that are kept."""

_LINE_CHARS = 300
_LOG_BYTES = 64_000
_PREFIX = "build-"
_END_S = 5.0
_PASSED_ON = re.compile(
    r"(https?|ftp|no|all)_proxy|SSL_CERT_(FILE|DIR)|(APPTAINER|SINGULARITY)_DOCKER_\w+", re.IGNORECASE
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# printed by every build, without useful information
_NOISE = re.compile(
    r"No default remote in use|INFO: +(Starting build|User not listed in /etc/subuid)|"
    r"WARNING: +(Skipping mount|Error changing the container working directory)"
)
_PASSING = re.compile(
    r"no space left on device|disk quota exceeded|cannot allocate memory|resource temporarily unavailable|"
    r"signal: killed|connection (refused|reset|timed out)|i/o timeout|handshake timeout|no such host|"
    r"(could not|couldn't|cannot) resolve|name resolution|network is unreachable|no route to host|"
    r"too ?many ?requests|\b50[0234] |input/output error",
    re.IGNORECASE,
)
_WROTE_THROUGH_LINK = re.compile(r"failed to make environment (files|dirs): ")
_OWN = {"tmp": "/tmp", "var-tmp": "/var/tmp"}  # noqa: S108
"""A build's own folders for temporary files of a definition's programs, with their paths inside."""
_FAKEROOT_BROKE = "/.singularity.d/libs/fakeroot: "


@contextmanager
def workplace(config: SandboxConfig) -> Iterator[Path]:
    """Yield a work folder of the sandbox user on local disk; remove it at the end, with those of killed builders."""
    with _locked(own_folder(config)):
        abandoned = _abandoned(config)
        work_folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=own_folder(config)))
        held = _opened(work_folder)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        for left, descriptor in abandoned.items():
            remove(left)
            os.close(descriptor)
        give(work_folder, config.user)
        yield work_folder
    finally:
        remove(work_folder)
        os.close(held)


def _abandoned(config: SandboxConfig) -> dict[Path, int]:
    abandoned = {}
    for work_folder in own_folder(config).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            descriptor = _opened(work_folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned[work_folder] = descriptor
            except BlockingIOError:
                os.close(descriptor)
    return abandoned


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = _opened(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def lend(path: Path, work_folder: Path, name: str, user: str, *, owned: bool = False) -> Path:
    """Return a path by which the sandbox user can read a file or folder: a link at `work_folder/name`, or a copy.

    Raises OSError if it cannot be read or copied. Blocks.

    With `owned`, it must also belong to that user; a copy does as soon as an image is built from it.
    """
    lent = work_folder / name
    lent.parent.mkdir(exist_ok=True)
    real = path.resolve(strict=True)
    if _can_go(real, user) and not (owned and real.stat().st_uid != owner(user)):
        lent.symlink_to(real)
        return lent
    copy_tree(real, lent)
    return lent


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file or a folder with modes, times and hard links to `target`. Raises OSError. Blocks.

    Owners are kept if this process is root; an ordinary user cannot give files away.
    """
    # as root of a user namespace, a user can also read files without read permission; the copies belong to the user
    enter = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--"]
    owners = [] if os.geteuid() == 0 else ["--no-preserve=ownership"]
    # a process that outlived this one would write into a folder that another process removes
    bound = ["setpriv", "--pdeathsig", "KILL", "--"]
    command = [*bound, *enter, "cp", "-a", *owners, "--", str(source), str(target)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{source} could not be copied: {' '.join(done.stderr.strip().splitlines()[-1:])}")


def move_tree(source: Path, target: Path) -> None:
    """Move a built folder, to another file system if necessary. Raises OSError. Blocks."""
    try:
        source.rename(target)
    except OSError:
        copy_tree(source, target)


def _can_go(path: Path, user: str) -> bool:
    """Return whether the sandbox user can read a file, or a folder with everything in it."""
    if sandbox_user(user) is None:
        return True
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and _is_open(path)


def _is_open(path: Path) -> bool:
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        return stat.S_ISLNK(mode) or bool(mode & stat.S_IROTH)
    return mode & 0o005 == 0o005 and all(map(_is_open, path.iterdir()))


def owner(user: str) -> int:
    """Return the id of the user that owns images and the files in sandboxes."""
    ids = sandbox_user(user)
    return ids[0] if ids else os.getuid()


class LinkInTheWay(ImageError):
    """The image has a link at a path where the runtime writes its own file."""


def build(
    config: SandboxConfig,
    words: Sequence[str],
    work_folder: Path,
    what: str,
    *,
    definition: bool = False,
    blobs: Path | None = None,
) -> Path:
    """Build an image from `words` and return its folder. ImageError with the builder's last lines. Blocks.

    `blobs` is a folder of the work folder for the blobs of a registry; see `shared_blobs`.
    """
    for name in _OWN if definition else ():
        Path(work_folder, name).mkdir(mode=0o777)
        Path(work_folder, name).chmod(0o1777)
    give(work_folder, config.user)
    options = ["--sandbox", *([] if blobs else ["--disable-cache"])]
    if definition and "apptainer" in str(program(config)):
        # the node's folders are read-only
        options += [word for name, target in _OWN.items() for word in ("--bind", f"{work_folder / name}:{target}")]
        # a sandbox could neither change nor delete files of other users
        options.append("--ignore-subuid")
    lines = _run(config, [*options, str(work_folder / "root"), *words], work_folder, what, blobs)
    if lines and any(_FAKEROOT_BROKE in line for line in lines):
        # the node's fakeroot does not work in every image; without it, only changes of owner fail
        remove(work_folder / "root")
        lines = _run(
            config, [*options, "--ignore-fakeroot-command", str(work_folder / "root"), *words], work_folder, what, blobs
        )
    if lines is not None:
        last = lines[-N_LINES:]
        kind = LinkInTheWay if any(map(_WROTE_THROUGH_LINK.search, last)) else ImageError
        raise kind(f"{what} could not be built", [_short(line) for line in last], retryable=is_passing(last))
    _open_to_owner(work_folder / "root")
    return work_folder / "root"


def _open_to_owner(root: Path) -> None:
    """Let the owner read and write all files of a tree; other mode bits stay, including set-user-ID bits."""
    # the runtime's --fix-perms would remove the set-user-ID bits
    waiting = [root]
    while waiting:
        path = waiting.pop()
        mode = path.lstat().st_mode
        needed = 0o700 if stat.S_ISDIR(mode) else 0o600 if stat.S_ISREG(mode) else 0
        if mode & needed != needed:
            path.chmod(stat.S_IMODE(mode) | needed)
        if stat.S_ISDIR(mode):
            waiting += path.iterdir()


def is_passing(lines: Sequence[str]) -> bool:
    """Return whether a builder's last lines blame disk, memory or network, so that a retry may succeed."""
    return any(map(_PASSING.search, lines))


def _run(
    config: SandboxConfig, words: Sequence[str], work_folder: Path, what: str, blobs: Path | None = None
) -> list[str] | None:
    """Run a build to its end. Return None if it worked, else its last lines. ImageError if it takes too long."""
    log = work_folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*runtime_words(config, "build", "--nocolor"), *words],
            env=environment(config, work_folder) | ({"BLOBS": str(blobs)} if blobs else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = process.wait(BUILD_S)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            late = f"{what} could not be built within {BUILD_S:.0f} s"
            raise ImageError(late, [_short(line) for line in last_lines(log)[-N_LINES:]], retryable=True) from None
        raise
    # its exit code counts, but only if the folder exists
    if code == 0 and (work_folder / "root").is_dir():
        return None
    return last_lines(log) or [f"the builder ended with code {code} and printed nothing"]


def runtime_words(config: SandboxConfig, action: str, *options: str) -> list[str]:
    """Return the first words of a command for the runtime, run in `environment()`. SandboxError if there is none."""
    words = client(config)._init_command(action, list(options))
    return [str(wrapper(config)), *(word for word in words[1:] if word != "--quiet")]


def environment(config: SandboxConfig, work_folder: Path) -> dict[str, str]:
    """Return the builder's variables: only proxies, certificates and the key to a registry."""
    passed = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    runtime_path = program(config)
    if runtime_path is None:
        raise SandboxError("the container runtime of this node is gone")
    path = f"{os.environ.get('PATH', os.defpath)}:{runtime_path.parent}"
    return passed | {"PATH": path, "LANG": "C.UTF-8", "WORK_FOLDER": str(work_folder)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the first process of its namespace, and with it all others; the command waits until they are gone."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with contextlib.suppress(OSError):
        for pid in children.read_text().split() or [str(process.pid)]:
            os.kill(int(pid), signal.SIGKILL)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a builder's output, without colours, temporary paths and the lines of every build."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace").replace(f"{log.parent}/", "")
    lines = (_COLOUR.sub("", line).strip() for line in re.split("[\r\n]+", text))
    return [line for line in lines if line and not _NOISE.search(line)]


def _short(line: str) -> str:
    """Return the line in printable characters; of a long line, the middle is dropped as least important."""
    plain = "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
    return plain if len(plain) <= _LINE_CHARS else f"{plain[: _LINE_CHARS // 3]} … {plain[-_LINE_CHARS * 2 // 3 :]}"
