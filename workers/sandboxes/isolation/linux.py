"""Linux system calls without a Python function: namespaces, mounts, process controls. Standard library only.

The fork server (`fork_server.py`) runs without site-packages and imports this module from its folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import termios
from collections.abc import Sequence

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_SET_CHILD_SUBREAPER, _PR_SET_NAME = 8, 23, 36, 15
_ARG_START = 48
"""Index of the field with the start of the command line in `/proc/self/stat`; the next one is its end."""
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 0x1000, 1, 4
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_IDMAP = 1, 2, 0x100000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# pivot_root differs between machines; the newer calls have the same number everywhere
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442

# root's capabilities in a Docker container: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
# net_bind_service, net_raw, sys_chroot, mknod, audit_write, setfcap (linux/capability.h)
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
WAKE_ALARM = 35
"""A capability without effect in a user namespace: the kernel checks it in the initial one only."""
SYS_PTRACE = 19
"""The capability to trace other processes."""
DAC_READ_SEARCH = 2
"""The capability to read and search every folder."""
_MAX_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _check(returned: int, what: str) -> None:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def read_text(path: str) -> str:
    """Return the content of a small file, such as one of /proc. Raises OSError.

    A file object would take twice as many system calls; a start of a sandbox reads a dozen files.
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
    """Write a /proc or /sys file with one system call. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def become_root_of_a_new_user_namespace(more: int = 0) -> None:
    """Create a user namespace, and the namespaces `more` owned by it. It maps the caller's uid and gid to 0."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        write_text(f"/proc/self/{name}", text)


def become_user_of_a_new_user_namespace(uid: int, gid: int) -> None:
    """Create a user namespace in which the caller's uid and gid, and the files they own, appear as `uid` and `gid`."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    # otherwise root owns the files in /proc/self
    let_others_look_in(True)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {outer_uid} 1"), ("gid_map", f"{gid} {outer_gid} 1")):
        write_text(f"/proc/self/{name}", text)
    let_others_look_in(False)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    returned = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(returned, f"mount {kind or source} on {target}")


def make_mounts_private() -> None:
    """Stop propagation of mounts between this mount namespace and others."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def bind_read_only(source: str, target: str) -> None:
    """Bind a folder, with its submounts, or a file. Needs Linux 5.12."""
    mount(source, target, flags=MS_BIND | MS_REC)
    _set_mount(_AT_FDCWD, target, _AT_RECURSIVE, f"make {target} read-only", _ATTR_RDONLY | _ATTR_NOSUID)


def _set_mount(
    folder: int, path: str, flags: int, what: str, wanted: int, cleared: int = 0, namespace: int = 0
) -> None:
    """Call mount_setattr(2)."""
    attributes = struct.pack("QQQQ", wanted, cleared, 0, namespace)
    size = ctypes.c_size_t(len(attributes))
    _check(_libc.syscall(_MOUNT_SETATTR, folder, path.encode(), flags, attributes, size), what)


def mounted_below(folders: Sequence[str]) -> list[bool]:
    """Return for each folder, an absolute path, whether it contains mounts."""
    points = [line.split(" ", 5)[4] for line in read_text("/proc/self/mountinfo").splitlines()]
    return [any(point.startswith(f"{_octal(folder)}/") for point in points) for folder in folders]


def _octal(path: str) -> str:
    for sign in "\\ \t\n":
        path = path.replace(sign, f"\\{ord(sign):03o}")
    return path


def leave_writable(targets: Sequence[str]) -> None:
    """Make all mounts of this mount namespace read-only, except those at `targets`. Needs Linux 5.12."""
    for target, flags, cleared in (("/", _AT_RECURSIVE, 0), *((target, 0, _ATTR_RDONLY) for target in targets)):
        what = f"make {target} {'writable' if cleared else 'read-only'}"
        _set_mount(_AT_FDCWD, target, flags, what, 0 if cleared else _ATTR_RDONLY, cleared)


def id_mapped(folder: str, namespace: int, read_only: bool) -> int:
    """Return a detached mount of a folder whose owners are mapped by a user namespace. Raises OSError.

    Only for root of the host. Needs Linux 5.12 and a file system that supports it; see mount_setattr(2).
    """
    tree = _libc.syscall(_OPEN_TREE, _AT_FDCWD, folder.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    _check(tree, f"open_tree {folder}")
    wanted = _ATTR_IDMAP | _ATTR_NOSUID | (_ATTR_RDONLY if read_only else 0)
    try:
        _set_mount(tree, "", _AT_EMPTY_PATH, f"map the owners in {folder}", wanted, namespace=namespace)
    except OSError:
        os.close(tree)
        raise
    return int(tree)


def attach(mounted: int, target: str) -> None:
    """Attach a detached mount to a folder of this mount namespace."""
    returned = _libc.syscall(_MOVE_MOUNT, mounted, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(returned, f"attach a mount to {target}")


def unmount(target: str) -> None:
    """Unmount lazily: processes that use the mount keep it until they close it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace. The old root is moved to `put_old`, a folder below it."""
    number = _PIVOT_ROOT[platform.machine()]
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def loopback_up() -> None:
    """Bring up `lo` in this network namespace, so that 127.0.0.1 works."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14s", b"lo", 0, b""))
        flags = struct.unpack_from("H", answer, 16)[0] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags, b""))


def die_with_parent(number: int) -> None:
    """Send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def prctl(option: int, value: int, more: bytes | int = 0) -> None:
    """Call prctl(2) with up to two arguments."""
    _check(_libc.prctl(option, value, more, 0, 0), "prctl")


def show_as(argv: Sequence[str], name: str = "") -> None:
    """Overwrite this process's command line, as far as it has room, and its short name if `name` is not empty.

    A forked process would otherwise be listed with its parent's.
    """
    fields = read_text("/proc/self/stat").rpartition(")")[2].split()
    # the first field after the name is number 3
    start, end = (int(field) for field in fields[_ARG_START - 3 :][:2])
    text = b"\0".join(map(str.encode, argv))[: max(0, end - start - 1)]
    if text:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    if name:
        _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl")


def become_subreaper() -> None:
    """Make this process the parent of descendants that lose theirs."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def let_others_look_in(allowed: bool) -> None:
    """Set whether processes of the same user may trace this one, copy its descriptors and read its executable.

    The kernel clears this after a change of user. A process without it cannot write its own uid map.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def no_new_privileges() -> None:
    """Set no_new_privs: set-uid programs give this process and its children no rights."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def setns(descriptor: int, flags: int) -> None:
    """Move this process into namespaces of the process behind a pidfd. NEWPID applies to its children."""
    _check(_libc.setns(descriptor, flags), "setns")


def become_root_inside() -> None:
    """Switch to uid and gid 0 of this user namespace, if the caller has others.

    The change makes the process undumpable and clears its parent death signal.
    """
    if os.geteuid() != 0:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def set_ids(uid: int, gid: int, kept: int | None = None) -> None:
    """Switch to a user with one group and no capability except `kept`. Valid until the next exec."""
    os.setgroups([])
    os.setgid(gid)
    prctl(_PR_SET_KEEPCAPS, int(kept is not None))
    os.setuid(uid)
    if kept is not None:
        _set_capabilities(1 << kept)


def drop_capabilities(also: int | None = None) -> None:
    """Limit capabilities from the next exec on to those of root in a Docker container, plus `also`.

    A process cannot trace another, or read its /proc files, if it lacks one of the other's capabilities.
    """
    for number in range(_MAX_CAPABILITIES):
        if number not in _KEPT_CAPABILITIES and number != also and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            # beyond the kernel's last capability
            return


def keep_bounded_capabilities() -> None:
    """Drop capabilities outside of the bounding set now, without an exec."""
    bounded = 0
    for number in range(_MAX_CAPABILITIES):
        held = _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if held < 0:
            break
        bounded |= held << number
    _set_capabilities(bounded)


def keep_only_docker_capabilities(also: int) -> None:
    """Drop capabilities now, except those of root in a Docker container and `also`."""
    _set_capabilities(sum(1 << number for number in (*_KEPT_CAPABILITIES, also)))


def _set_capabilities(wanted: int) -> None:
    low, high = wanted & 0xFFFFFFFF, wanted >> 32
    # linux/capability.h: effective, permitted, inheritable; lower half, then upper half
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0))
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, data), "capset")


def take_terminal(descriptor: int) -> None:
    """Make a terminal the controlling terminal of this session, which must have none."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
