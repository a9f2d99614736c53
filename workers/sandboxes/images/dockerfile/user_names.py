"""Users of an image, from its own /etc/passwd and /etc/group, as named by USER and --chown."""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import ToolError
from workers.sandboxes.images.dockerfile.build_place import BuildPlace, Owner


@dataclass(frozen=True, slots=True)
class Account:
    """A user by number, with its group and home folder."""

    uid: int
    gid: int
    home: str

    @property
    def identity(self) -> tuple[int, int] | None:
        """User and group of its programs; None for root, which is the default."""
        return (self.uid, self.gid) if self.uid else None


def account_of(place: BuildPlace, written: str) -> Account:
    """Return the account of USER: a name or number, optionally with a group after a colon. ValueError if unknown."""
    return account_in(written, _lines(place, "/etc/passwd"), _lines(place, "/etc/group"))


def owner_of_files(place: BuildPlace, written: str) -> Owner:
    """Return the owner for --chown or WORKDIR. A number without a group is also the group. ValueError if unknown."""
    account = account_of(place, written)
    return (account.uid, account.uid) if written.isdigit() else (account.uid, account.gid)


def account_in(written: str, passwd: list[list[str]], group: list[list[str]]) -> Account:
    """Return the account like `account_of`, from the parsed lines of the two files."""
    user, _, of_group = written.partition(":")
    user = user or "0"
    entry = next((line for line in passwd if len(line) >= 6 and user in (line[0], line[2])), None)
    if entry is None and not user.isdigit():
        raise ValueError(f"the image has no user {user}")
    uid, gid, home = (int(entry[2]), int(entry[3]), entry[5]) if entry else (int(user), 0, "/")
    if of_group:
        named = next((line for line in group if len(line) >= 3 and of_group in (line[0], line[2])), None)
        if named is None and not of_group.isdigit():
            raise ValueError(f"the image has no group {of_group}")
        gid = int(named[2]) if named else int(of_group)
    return Account(uid, gid, home or ("/root" if uid == 0 else "/"))


def _lines(place: BuildPlace, path: str) -> list[list[str]]:
    try:
        text = place.read_file(path).decode(errors="replace")
    except ToolError:
        return [["root", "", "0", "0", "", "/root", ""]] if path.endswith("passwd") else []
    return [line.split(":") for line in text.splitlines() if line and not line.startswith("#")]
