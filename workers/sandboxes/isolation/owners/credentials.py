"""Simulated users and groups of a sandbox's processes, and the calls that change them. Standard library only.

The rules are the kernel's (credentials(7), setresuid(2), execve(2)), but the kernel itself knows one user for all
processes of a sandbox. `has_right` is the right to become any user: root has it, and loses it when its last uid of 0
changes, unless it has requested to keep its capabilities.

The credentials of a process are stored as a number in the soft limit of file locks (`RLIMIT_LOCKS`), which has had no
effect since Linux 2.4. The kernel copies it at fork and exec, and frees it with the process. No limit means root.
"""

from __future__ import annotations

import errno
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    Ids: TypeAlias = tuple[int, int, int, int]
    """Real, effective, saved and file system id."""

LOCKS = 10
"""RLIMIT_LOCKS; Python has no constant for it."""
UNCHANGED = 0xFFFFFFFF
_OVERFLOW = 0xFFFF
_MAX_GROUPS = 65536
_MAX_KNOWN = 65536
"""Different credentials of one sandbox; entries are never removed, as a process may store its number at any time."""
_OF_PEER = b"\0farm-peer:"
_KEEP, _SECURE_BITS = 8, 28
"""prctl options PR_SET_KEEPCAPS and PR_SET_SECUREBITS."""
_KEEP_BITS = 1 << 4 | 1 << 2


class Credentials:
    """The users, groups and right of one process. Immutable."""

    __slots__ = ("groups", "has_right", "keeps_right", "others", "users")

    def __init__(
        self, users: Ids, groups: Ids, others: tuple[int, ...] = (), has_right: bool = True, keeps_right: bool = False
    ) -> None:
        self.users = users
        self.groups = groups
        self.others = others
        """Supplementary groups."""
        self.has_right = has_right
        self.keeps_right = keeps_right

    def key(self) -> tuple[object, ...]:
        """Return a value that is equal for equal credentials."""
        return self.users, self.groups, self.others, self.has_right, self.keeps_right

    @property
    def owner(self) -> tuple[int, int]:
        """The uid and gid of new files."""
        return self.users[3], self.groups[3]

    def after(self, name: str, arguments: Sequence[int]) -> Credentials:
        """Return the credentials after a call that changes ids. Raises OSError with the kernel's errno on refusal."""
        of_users = name.endswith("uid")
        now = self.users if of_users else self.groups
        ids = _CHANGES[name[3:-3]](now, [each & 0xFFFFFFFF for each in arguments], self.has_right)
        if not of_users:
            return Credentials(self.users, ids, self.others, self.has_right, self.keeps_right)
        has_right = ids[1] == 0 or (self.has_right and self.keeps_right)
        return Credentials(ids, self.groups, self.others, has_right, self.keeps_right)

    def with_others(self, groups: tuple[int, ...]) -> Credentials:
        """Return the credentials after setgroups(2). Raises OSError."""
        if not self.has_right:
            raise OSError(errno.EPERM, "setgroups")
        return Credentials(self.users, self.groups, groups, self.has_right, self.keeps_right)

    def after_control(self, option: int, value: int) -> Credentials:
        """Return the credentials after a prctl(2) that sets whether rights are kept at a change of user."""
        keeps = value if option == _KEEP else value & _KEEP_BITS
        return Credentials(self.users, self.groups, self.others, self.has_right, bool(keeps))

    def after_exec(self, uid: int | None, gid: int | None) -> Credentials:
        """Return the credentials after execve(2). `uid`, `gid`: owner of a set-user-id or set-group-id program."""
        real, effective = self.users[0], self.users[1] if uid is None else uid
        real_group, effective_group = self.groups[0], self.groups[1] if gid is None else gid
        return Credentials(
            (real, effective, effective, effective),
            (real_group, effective_group, effective_group, effective_group),
            self.others,
            effective == 0,
        )

    def may_give(self, owner: tuple[int, int], uid: int, gid: int) -> bool:
        """Return whether a chown(2) of a file of `owner` is permitted. `UNCHANGED` leaves an id as it is."""
        if self.has_right or (uid, gid) == (UNCHANGED, UNCHANGED):
            return True
        if owner[0] != self.users[3] or uid not in (UNCHANGED, owner[0]):
            return False
        return gid in (UNCHANGED, owner[1], self.groups[3], *self.others)


def of_user(uid: int, gid: int) -> Credentials:
    """Return the credentials of a program that is started as this user."""
    return Credentials((uid,) * 4, (gid,) * 4, (gid,) if uid or gid else (), uid == 0)


class CredentialsTable:
    """The credentials of the processes of one program and its descendants, by the number stored in each process."""

    def __init__(self, first: Credentials) -> None:
        self._known = [of_user(0, 0), first]
        self._numbers = {first.key(): 1, self._known[0].key(): 0}

    def of(self, process: int) -> Credentials:
        """Return the credentials of a process or thread. Raises OSError if it has ended."""
        number = resource.prlimit(process, LOCKS)[0]
        index = 0 if number == resource.RLIM_INFINITY else number >> 32
        return self._known[index] if index < len(self._known) else self._known[0]

    def give(self, process: int, credentials: Credentials) -> None:
        """Set the credentials of a process. Raises OSError if it has ended, or if there are too many different ones."""
        key = credentials.key()
        index = self._numbers.get(key)
        if index is None:
            if len(self._known) >= _MAX_KNOWN:
                raise OSError(errno.EAGAIN, "too many different credentials")
            index = self._numbers[key] = len(self._known)
            self._known.append(credentials)
        hard = resource.prlimit(process, LOCKS)[1]
        resource.prlimit(process, LOCKS, (_number(index, credentials), hard))


def begin_as(first: Credentials) -> None:
    """Store the number of a table's first credentials in this process, unless they are root's."""
    if first.key() != of_user(0, 0).key():
        resource.setrlimit(LOCKS, (_number(1, first), resource.getrlimit(LOCKS)[1]))


def shown(process: int) -> tuple[int, int] | None:
    """Return the effective uid and gid of a process of any table; None if they are too large. Raises OSError."""
    return _parsed(resource.prlimit(process, LOCKS)[0])


def shown_outside(process: int) -> tuple[int, int] | None:
    """Return the same for a process of another user of the node. Raises OSError."""
    with open(f"/proc/{process}/limits") as file:
        soft = next((line.split()[3] for line in file if line.startswith("Max file locks")), "unlimited")
    return _parsed(int(soft) if soft.isdecimal() else resource.RLIM_INFINITY)


def _parsed(number: int) -> tuple[int, int] | None:
    if number == resource.RLIM_INFINITY:
        return 0, 0
    uid, gid = number & 0xFFFF, number >> 16 & 0xFFFF
    return None if _OVERFLOW in (uid, gid) else (uid, gid)


def address_of(uid: int, gid: int) -> bytes:
    """Return a Unix socket address for a connection on behalf of a user of another sandbox."""
    return _OF_PEER + b"%d:%d:%s" % (uid, gid, os.urandom(8).hex().encode())


def user_of_address(address: object) -> tuple[int, int] | None:
    """Return the uid and gid in an address made by `address_of`, or None."""
    if not isinstance(address, bytes) or not address.startswith(_OF_PEER):
        return None
    uid, gid = address.removeprefix(_OF_PEER).split(b":")[:2]
    return int(uid), int(gid)


def _number(index: int, credentials: Credentials) -> int:
    if index == 0:
        return resource.RLIM_INFINITY
    uid, gid = min(credentials.users[1], _OVERFLOW), min(credentials.groups[1], _OVERFLOW)
    return index << 32 | gid << 16 | uid


def _checked(new_id: int, allowed: Sequence[int], has_right: bool) -> None:
    if new_id != UNCHANGED and not has_right and new_id not in allowed:
        raise OSError(errno.EPERM, "change of ids")


def _set(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    new_id = arguments[0]
    if new_id == UNCHANGED:
        raise OSError(errno.EINVAL, "change of ids")
    _checked(new_id, (now[0], now[2]), has_right)
    return (new_id,) * 4 if has_right else (now[0], new_id, now[2], new_id)


def _set_two(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    real, effective = arguments[:2]
    _checked(real, now[:2], has_right)
    _checked(effective, now[:3], has_right)
    new_real = now[0] if real == UNCHANGED else real
    new = now[1] if effective == UNCHANGED else effective
    saves = real != UNCHANGED or effective not in (UNCHANGED, now[0])
    return new_real, new, new if saves else now[2], new


def _set_three(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    for new_id in arguments[:3]:
        _checked(new_id, now[:3], has_right)
    real, effective, saved = (old if each == UNCHANGED else each for each, old in zip(arguments[:3], now, strict=False))
    return real, effective, saved, effective


def _set_of_files(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    new_id = arguments[0]
    # setfsuid(2) never fails
    return (*now[:3], new_id) if new_id != UNCHANGED and (has_right or new_id in now) else now


_CHANGES = {"": _set, "re": _set_two, "res": _set_three, "fs": _set_of_files}
