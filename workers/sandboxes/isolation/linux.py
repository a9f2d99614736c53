"""The Linux calls that Python has no names for: namespaces, mounts, process controls; standard library only.

The fork server (`fork_server.py`) runs without site-packages and imports this module by its folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_SET_CHILD_SUBREAPER, _PR_SET_NAME = 8, 23, 36, 15
_ARG_START = 48
"""The field of `/proc/self/stat` with the address of the command line; the next one has its end (man proc_pid_stat)."""
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 0x1000, 1, 4
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_IDMAP = 1, 2, 4, 0x100000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# pivot_root has a number of its own on each machine type; the others came late enough to have one everywhere
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442

# what Docker leaves to root, from linux/capability.h: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
# setpcap, net_bind_service, net_raw, sys_chroot, mknod, audit_write, setfcap
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
WAKE_ALARM = 35
"""A capability that is worth nothing in a user namespace, as the kernel checks it in the first one only."""
SYS_PTRACE = 19
"""The capability to look into other processes."""
DAC_READ_SEARCH = 2
"""The capability to read and search every folder."""
_MAX_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def read_text(path: str) -> str:
    """Return a file of the kernel's or another small one. Raises OSError.

    A file object would take twice as many system calls, and a dozen such files are used to start a sandbox.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, 8192):
            pieces.append(piece)
    finally:
        os.close(descriptor)
    return b"".join(pieces).decode(errors="replace")


def write_text(path: str, text: str) -> None:
    """Write a file of the kernel's, which takes it in one piece. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def become_root_of_a_new_user_namespace(more: int = 0) -> None:
    """New user namespace, with `more` that it owns; uid 0 inside is the caller's uid outside, and there is no other."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        write_text(f"/proc/self/{name}", text)


def become_user_of_a_new_user_namespace(uid: int, gid: int) -> None:
    """New user namespace; the caller's one user is `uid` inside, and so is the owner of all that the caller owns."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    # else the files belong to another
    let_others_look_in(True)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {outer_uid} 1"), ("gid_map", f"{gid} {outer_gid} 1")):
        write_text(f"/proc/self/{name}", text)
    let_others_look_in(False)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def make_mounts_private() -> None:
    """Keep mounts made here from now on from being seen outside, and the other way round."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def bind_read_only(source: str, target: str) -> None:
    """Bind a folder (with what is mounted below it) or a file. Needs Linux 5.12."""
    mount(source, target, flags=MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(result, f"make {target} read-only")


def mounted_below(folders: Sequence[str]) -> list[bool]:
    """Return for each of these folders, absolute paths, whether anything is mounted in it."""
    points = [line.split(" ", 5)[4] for line in read_text("/proc/self/mountinfo").splitlines()]
    return [any(point.startswith(f"{_octal(folder)}/") for point in points) for folder in folders]


def _octal(path: str) -> str:
    """Return a path as the kernel writes it in a line."""
    for sign in "\\ \t\n":
        path = path.replace(sign, f"\\{ord(sign):03o}")
    return path


def leave_writable(targets: Sequence[str]) -> None:
    """Make all mounts of this mount namespace read-only but those at these folders. Needs Linux 5.12."""
    for target, flags, cleared in (("/", _AT_RECURSIVE, 0), *((target, 0, _ATTR_RDONLY) for target in targets)):
        attributes = struct.pack("QQQQ", 0 if cleared else _ATTR_RDONLY, cleared, 0, 0)
        result = _libc.syscall(
            _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, attributes, ctypes.c_size_t(len(attributes))
        )
        _check(result, f"make {target} {'writable' if cleared else 'read-only'}")


def id_mapped(folder: str, namespace: int, read_only: bool) -> int:
    """A mount of a folder, attached nowhere yet, whose owners are shown as a user namespace maps them. Raises OSError.

    For root of the host only. Needs Linux 5.12 and a file system that supports it; see mount_setattr(2).
    """
    tree = _libc.syscall(_OPEN_TREE, _AT_FDCWD, folder.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    _check(tree, f"open_tree {folder}")
    flags = _ATTR_IDMAP | _ATTR_NOSUID | (_ATTR_RDONLY if read_only else 0)
    attributes = struct.pack("QQQQ", flags, 0, 0, namespace)
    result = _libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes)))
    try:
        _check(result, f"map the owners in {folder}")
    except OSError:
        os.close(tree)
        raise
    return int(tree)


def attach(mounted: int, target: str) -> None:
    """Attach a mount to a folder of this mount namespace."""
    result = _libc.syscall(_MOVE_MOUNT, mounted, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(result, f"attach a mount to {target}")


def unmount(target: str) -> None:
    """Take a mount away, at once for new users of it, for the others when they leave."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace; the old one is found at `put_old`, below it."""
    number = _PIVOT_ROOT[platform.machine()]
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


def set_hostname(name: str) -> None:
    """The host name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def loopback_up() -> None:
    """Bring up `lo` in this network namespace, as programs expect 127.0.0.1 to work."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14s", b"lo", 0, b""))
        flags = struct.unpack_from("H", answer, 16)[0] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags, b""))


def die_with_parent(number: int) -> None:
    """Send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def prctl(option: int, value: int, more: bytes | int = 0) -> None:
    """prctl(2), with what two of its arguments point at or are."""
    _check(_libc.prctl(option, value, more, 0, 0), "prctl")


def show_as(argv: Sequence[str], name: str = "") -> None:
    """Overwrite this process's command line, as far as there is room in it, and its short name, if there is another.

    Those of a forked process would be those of the process it was forked from.
    """
    fields = read_text("/proc/self/stat").rpartition(")")[2].split()
    # the first of them is the third
    start, end = (int(field) for field in fields[_ARG_START - 3 :][:2])
    text = b"\0".join(map(str.encode, argv))[: max(0, end - start - 1)]
    if text:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    if name:
        _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Make descendants whose parents end children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def let_others_look_in(allowed: bool) -> None:
    """Set whether processes of the same user may trace this one, copy its descriptors and open what it runs.

    The kernel forbids it after a change of user, and then keeps a process from writing its own uid map, too.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def no_new_privileges() -> None:
    """No set-uid program raises this process or its children."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def setns(descriptor: int, flags: int) -> None:
    """Move this process into namespaces of the process that a pidfd refers to; its children, for NEWPID."""
    _check(_libc.setns(descriptor, flags), "setns")


def become_root_inside() -> None:
    """Take uid and gid 0 of this user namespace, which may not be those that the caller came in with.

    A change of user keeps others from looking in, and takes the signal for a parent's end away.
    """
    if os.geteuid() != 0:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def set_ids(uid: int, gid: int, kept: int | None = None) -> None:
    """Become another user, of this group alone, with no capabilities but `kept`, until the next exec."""
    os.setgroups([])
    os.setgid(gid)
    prctl(_PR_SET_KEEPCAPS, int(kept is not None))
    os.setuid(uid)
    if kept is not None:
        _set_capabilities(1 << kept)


def drop_capabilities(but: int | None = None) -> None:
    """From the next exec on, root of a user namespace can do what root of a Docker container can, and `but` that.

    A process that lacks a capability of another can neither trace it nor read its files in /proc.
    """
    for number in range(_MAX_CAPABILITIES):
        if number not in _KEPT_CAPABILITIES and number != but and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            # the kernel has fewer
            return


def keep_bounded_capabilities() -> None:
    """Give up at once the rights that otherwise only an exec would take: those that are not in the bounding set."""
    bounded = 0
    for number in range(_MAX_CAPABILITIES):
        held = _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if held < 0:
            break
        bounded |= held << number
    _set_capabilities(bounded)


def keep_only_docker_capabilities(also: int) -> None:
    """Give up at once what root of a Docker container has not, but for one more."""
    _set_capabilities(sum(1 << number for number in (*_KEPT_CAPABILITIES, also)))


def _set_capabilities(wanted: int) -> None:
    low, high = wanted & 0xFFFFFFFF, wanted >> 32
    # linux/capability.h: effective, permitted and inheritable, of the lower and the upper half
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0))
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, data), "capset")


def take_terminal(descriptor: int) -> None:
    """Make a terminal the controlling one of this session, which has none."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
