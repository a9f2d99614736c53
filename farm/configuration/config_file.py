"""farm.toml: the file named by FARM_CONFIG, else ./farm.toml, else the one in FARM_HOME; only one of them is read.

Read without pydantic, as every command looks for it and most farms have none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from farm.errors import InvalidRequest

NAME = "farm.toml"
VARIABLE = "FARM_CONFIG"
OWN_TABLES: tuple[str, ...] = ("slurm",)
"""Tables of the file that are not settings; other parts of the farm read them from `ConfigFile.values`."""
_PROBE = "farm-probe"
_MAX_BYTES = 1_000_000
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}
"""Errors that mean that there is no file, or that its folder is not accessible."""


def default_home() -> Path:
    """Return the clone's `.farm` if this runs in the environment that `make` created there, else `~/.farm`.

    So the commands of its `.venv` find the results of `make demo` from any folder.
    """
    environment = Path(sys.prefix)
    with contextlib.suppress(OSError):
        if (environment / "place").read_text().strip() == str(environment.parent):
            return environment.parent / ".farm"
    return Path.home() / ".farm"


def candidate_paths() -> list[Path]:
    """Return the candidate paths: the first existing file is read; one named by FARM_CONFIG must exist.

    Raises InvalidRequest if that is not a valid path.
    """
    named = os.environ.get(VARIABLE, "")
    if named:
        try:
            return [_of_user(named).absolute()]
        except ValueError as error:
            raise InvalidRequest(str(error), field=VARIABLE) from None
    home = os.environ.get("FARM_HOME", "")
    with contextlib.suppress(OSError):
        # the working folder may have been removed
        return [Path.cwd() / NAME, (Path(home) if home else default_home()).absolute() / NAME]
    return [Path(home) / NAME] if home.startswith("/") else []


def path_in_use() -> Path | None:
    """Return the file to read; None if there is none. Raises InvalidRequest for an untrusted one.

    The working folder may be anybody's, such as /tmp, and a setting can redirect what a command sends.
    """
    if os.environ.get(VARIABLE):
        return candidate_paths()[0]
    for n, path in enumerate(candidate_paths()):
        try:
            owners = {path.lstat().st_uid, path.stat().st_uid}
            open_to_all = path.stat().st_mode & stat.S_IWOTH
        except OSError as error:
            if error.errno in _NO_FILE and not path.is_symlink():
                continue
            raise _unreadable(path, error) from error
        if n == 0 and (owners - {os.getuid(), 0} or open_to_all):
            reason = "can be changed by other users" if open_to_all else "belongs to another user"
            raise InvalidRequest(f"{path} {reason}: if you trust it, set {VARIABLE}={path}", field=VARIABLE)
        return path
    return None


def pinned() -> dict[str, str]:
    """Return the variable that makes another process read the same file, whatever its home is."""
    path = path_in_use()
    return {} if path is None else {VARIABLE: str(path)}


class ConfigFile:
    """A parsed settings file: its unchanged values by key. Raises InvalidRequest.

    `path` is absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise InvalidRequest(f"{path} has more than {_MAX_BYTES:_} bytes", field=_named())
            self._text = content.decode("utf-8-sig")
            self.values: dict[str, Any] = tomllib.loads(self._text)
        except OSError as error:
            raise _unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{path} is not in UTF-8: {error.reason}", field=_named()) from None
        # also for numbers of thousands of digits and deeply nested brackets
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not TOML: {error}", field=_named()) from None

    def location_of(self, key: str) -> str:
        """Return file:line of a top-level key, or only the file if its line is unknown."""
        starts = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[]=.]""")
        lines = self._text.splitlines()
        for n, line in enumerate(lines):
            is_header = line.lstrip().startswith("[")
            if starts.match(line) and _is_statement(lines[:n], is_header):
                return f"{self.path}:{n + 1}"
        return str(self.path)


def nearest(key: str, known: Iterable[str]) -> str:
    """Return a sentence with the setting whose name is closest to a key."""
    plain = re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_").removeprefix("farm_")
    by_letters = {name.replace("_", ""): name for name in sorted(known)}
    close = get_close_matches(plain.replace("_", ""), by_letters, n=1, cutoff=0.6)
    names = [by_letters[each] for each in close]
    return f"did you mean {names[0]}?" if names else "`farm config` lists all"


def from_file(value: str, folder: Path) -> str:
    """Return a path in the file as an absolute path: `~` is the user's home; relative paths start at the file's folder.

    Raises ValueError for an invalid path.
    """
    return str(folder / _of_user(value))


def _of_user(value: str) -> Path:
    if "\0" in value:
        raise ValueError("a path cannot contain NUL")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no such home: {value}") from None


def _is_statement(before: list[str], is_header: bool) -> bool:
    """Return whether a top-level statement begins after these lines, not inside a string or a table."""
    try:
        parsed = tomllib.loads("\n".join([*before, f"{_PROBE} = 1"]))
    except tomllib.TOMLDecodeError:
        return False
    return is_header or _PROBE in parsed


def _named() -> str:
    """Return the name of the variable that names the file, if it does."""
    return VARIABLE if os.environ.get(VARIABLE) else ""


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be read ({error.strerror})", field=_named())
