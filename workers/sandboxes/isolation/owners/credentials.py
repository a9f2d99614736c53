"""The users and groups that a process of a sandbox is meant to have, and how calls change them; standard library only.

The rules are those of the kernel (credentials(7), setresuid(2), execve(2)), for which every process of a sandbox has
the same one user. A right is the one to become any user: root has it, and loses it with its last 0, unless it has asked
to keep its capabilities.

A process's credentials are a number that the kernel hands on by fork and exec, and forgets with the process: the soft
limit of file locks (`RLIMIT_LOCKS`), which the kernel has not heeded since Linux 2.4. None is set for root's.
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
    """Real, effective, saved, and that of file systems."""

LOCKS = 10
"""RLIMIT_LOCKS, for which Python has no name."""
UNCHANGED = 0xFFFFFFFF
_UNTOLD = 0xFFFF
_MAX_GROUPS = 65536
_OF_PEER = b"\0farm-peer:"
_KEEP, _SECURE_BITS = 8, 28
"""Of prctl: PR_SET_KEEPCAPS and PR_SET_SECUREBITS."""
_KEEPING = 1 << 4 | 1 << 2


class Credentials:
    """The users, groups and right of one process; replaced when they change."""

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
        """Equal for equal ones."""
        return self.users, self.groups, self.others, self.has_right, self.keeps_right

    @property
    def owner(self) -> tuple[int, int]:
        """The user and group of the files that it makes."""
        return self.users[3], self.groups[3]

    def _with_users(self, users: Ids) -> Credentials:
        has_right = users[1] == 0 or (self.has_right and self.keeps_right)
        return Credentials(users, self.groups, self.others, has_right, self.keeps_right)

    def _with_groups(self, groups: Ids) -> Credentials:
        return Credentials(self.users, groups, self.others, self.has_right, self.keeps_right)

    def after(self, name: str, arguments: Sequence[int]) -> Credentials:
        """Return those after a call that changes ids, by its name. OSError, with the kernel's number, if it may not."""
        of_users = name.endswith("uid")
        now = self.users if of_users else self.groups
        ids = _CHANGES[name[3:-3]](now, [each & 0xFFFFFFFF for each in arguments], self.has_right)
        return self._with_users(ids) if of_users else self._with_groups(ids)

    def with_others(self, groups: tuple[int, ...]) -> Credentials:
        """Return those after setgroups(2). OSError."""
        if not self.has_right:
            raise OSError(errno.EPERM, "setgroups")
        return Credentials(self.users, self.groups, groups, self.has_right, self.keeps_right)

    def after_control(self, option: int, value: int) -> Credentials:
        """Return those after a prctl(2) that says what becomes of rights when the user changes."""
        keeps = value if option == _KEEP else value & _KEEPING
        return Credentials(self.users, self.groups, self.others, self.has_right, bool(keeps))

    def after_exec(self, uid: int | None, gid: int | None) -> Credentials:
        """Return those of a program that is begun; of a set-id one, with the user and group whose it is."""
        real, effective = self.users[0], self.users[1] if uid is None else uid
        real_group, effective_group = self.groups[0], self.groups[1] if gid is None else gid
        return Credentials(
            (real, effective, effective, effective),
            (real_group, effective_group, effective_group, effective_group),
            self.others,
            effective == 0,
        )

    def may_give(self, owner: tuple[int, int], uid: int, gid: int) -> bool:
        """Return whether it may make a file of `owner` that of others; `UNCHANGED` leaves what is."""
        if self.has_right or (uid, gid) == (UNCHANGED, UNCHANGED):
            return True
        if owner[0] != self.users[3] or uid not in (UNCHANGED, owner[0]):
            return False
        return gid in (UNCHANGED, owner[1], self.groups[3], *self.others)


def of_user(uid: int, gid: int) -> Credentials:
    """Return those of a program that is started as a user."""
    return Credentials((uid,) * 4, (gid,) * 4, (gid,) if uid or gid else (), uid == 0)


class CredentialsTable:
    """The credentials of the processes of one program and all that it starts, by the numbers that those carry."""

    def __init__(self, first: Credentials) -> None:
        self._known = [of_user(0, 0), first]
        self._numbers = {first.key(): 1, self._known[0].key(): 0}

    def of(self, process: int) -> Credentials:
        """Return those of a process, or of a thread's. OSError if it is gone."""
        number = resource.prlimit(process, LOCKS)[0]
        at = 0 if number == resource.RLIM_INFINITY else number >> 32
        return self._known[at] if at < len(self._known) else self._known[0]

    def give(self, process: int, credentials: Credentials) -> None:
        """Give a process others. OSError if it is gone."""
        key = credentials.key()
        at = self._numbers.get(key)
        if at is None:
            at = self._numbers[key] = len(self._known)
            self._known.append(credentials)
        hard = resource.prlimit(process, LOCKS)[1]
        resource.prlimit(process, LOCKS, (_number(at, credentials), hard))


def begin_as(first: Credentials) -> None:
    """Have this process carry the number of the first of a table, unless it is root's."""
    if first.key() != of_user(0, 0).key():
        resource.setrlimit(LOCKS, (_number(1, first), resource.getrlimit(LOCKS)[1]))


def shown(process: int) -> tuple[int, int] | None:
    """Return the effective user and group of a process of whichever table; None if they are too high. OSError."""
    return _parsed(resource.prlimit(process, LOCKS)[0])


def shown_outside(process: int) -> tuple[int, int] | None:
    """As `shown`, of a process of another user of the node. OSError."""
    with open(f"/proc/{process}/limits") as file:  # noqa: PTH123
        soft = next((line.split()[3] for line in file if line.startswith("Max file locks")), "unlimited")
    return _parsed(int(soft) if soft.isdecimal() else resource.RLIM_INFINITY)


def _parsed(number: int) -> tuple[int, int] | None:
    if number == resource.RLIM_INFINITY:
        return 0, 0
    uid, gid = number & 0xFFFF, number >> 16 & 0xFFFF
    return None if _UNTOLD in (uid, gid) else (uid, gid)


def address_of(uid: int, gid: int) -> bytes:
    """Return an address for a Unix socket that is connected for a user of another sandbox, and tells who that is."""
    return _OF_PEER + b"%d:%d:%s" % (uid, gid, os.urandom(8).hex().encode())


def user_of_address(address: object) -> tuple[int, int] | None:
    """Return the user and the group that are in an address of `address_of`; None of another."""
    if not isinstance(address, bytes) or not address.startswith(_OF_PEER):
        return None
    uid, gid = address.removeprefix(_OF_PEER).split(b":")[:2]
    return int(uid), int(gid)


def _number(at: int, credentials: Credentials) -> int:
    if at == 0:
        return resource.RLIM_INFINITY
    uid, gid = min(credentials.users[1], _UNTOLD), min(credentials.groups[1], _UNTOLD)
    return at << 32 | gid << 16 | uid


def _checked(wanted: int, allowed: Sequence[int], has_right: bool) -> None:
    if wanted != UNCHANGED and not has_right and wanted not in allowed:
        raise OSError(errno.EPERM, "change of ids")


def _set(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    wanted = arguments[0]
    if wanted == UNCHANGED:
        raise OSError(errno.EINVAL, "change of ids")
    _checked(wanted, (now[0], now[2]), has_right)
    return (wanted,) * 4 if has_right else (now[0], wanted, now[2], wanted)


def _set_two(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    real, effective = arguments[:2]
    _checked(real, now[:2], has_right)
    _checked(effective, now[:3], has_right)
    new_real = now[0] if real == UNCHANGED else real
    new = now[1] if effective == UNCHANGED else effective
    saves = real != UNCHANGED or effective not in (UNCHANGED, now[0])
    return new_real, new, new if saves else now[2], new


def _set_three(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    for wanted in arguments[:3]:
        _checked(wanted, now[:3], has_right)
    real, effective, saved = (old if each == UNCHANGED else each for each, old in zip(arguments[:3], now, strict=False))
    return real, effective, saved, effective


def _set_of_files(now: Ids, arguments: Sequence[int], has_right: bool) -> Ids:
    wanted = arguments[0]
    # it never fails
    return (*now[:3], wanted) if wanted != UNCHANGED and (has_right or wanted in now) else now


_CHANGES = {"": _set, "re": _set_two, "res": _set_three, "fs": _set_of_files}
