# ruff: noqa: PTH123
# the monitor of a sandbox imports this, and pathlib would double the time of its start
"""The Linux calls that Python has no names for: namespaces, mounts, process controls; standard library only.

The porter (`porter_server.py`) runs without site-packages and imports this module by its folder.
"""

import ctypes
import fcntl
import os
import platform
import socket
import struct
import termios

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_CAPBSET_READ, _PR_SET_CHILD_SUBREAPER = 23, 36
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# pivot_root has a number of its own on each machine type; mount_setattr came late enough to have one everywhere
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

# what Docker leaves to root, from linux/capability.h: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
# setpcap, net_bind_service, net_raw, sys_chroot, mknod, audit_write, setfcap
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
_MAX_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def become_root_of_a_new_user_namespace(more: int = 0) -> None:
    """New user namespace, with `more` that it owns; uid 0 inside is the caller's uid outside, and there is no other."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def make_mounts_private() -> None:
    """What is mounted here from now on is not seen outside, nor the other way."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def bind_read_only(source: str, target: str) -> None:
    """Bind a folder (with what is mounted below it) or a file. Needs Linux 5.12."""
    mount(source, target, flags=MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(result, f"make {target} read-only")


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


def adopt_orphans() -> None:
    """Descendants whose parents end become children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def let_others_look_in(allowed: bool) -> None:
    """Whether processes of the same user may trace this one, copy its descriptors and open what it runs.

    The kernel says no after a change of user, and then keeps a process from writing its own uid map, too.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def no_new_privileges() -> None:
    """No set-uid program raises this process or its children."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def setns(descriptor: int, flags: int) -> None:
    """Move this process into namespaces of the process that a pidfd refers to; its children, for NEWPID."""
    _check(_libc.setns(descriptor, flags), "setns")


def drop_capabilities() -> None:
    """From the next exec on, root of a user namespace can do what root of a Docker container can, and no more."""
    for number in range(_MAX_CAPABILITIES):
        if number not in _KEPT_CAPABILITIES and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            # the kernel knows fewer
            return


def keep_bounded_capabilities() -> None:
    """Give up at once the rights that otherwise only an exec would take: those that are not in the bounding set."""
    bounded = 0
    for number in range(_MAX_CAPABILITIES):
        held = _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if held < 0:
            break
        bounded |= held << number
    low, high = bounded & 0xFFFFFFFF, bounded >> 32
    # linux/capability.h: effective, permitted and inheritable, of the lower and the upper half
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0))
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, data), "capset")


def no_nested_user_namespaces() -> None:
    """Below the caller's user namespace there will be no other, in which all capabilities could be had again."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def take_terminal(descriptor: int) -> None:
    """Make a terminal the controlling one of this session, which has none."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
