"""The rule that decides which paths of a layer stay after a policy has changed an image. Standard library only.

1. Files that an interpreter, a shell or the loader runs by itself never stay.
2. In system folders (/usr, /bin, /sbin, /lib*, /etc, programs and libraries of /opt, user site folders) the image's
   files are restored. Exception: paths that the task's tests, instructions and configuration name can be changed, but
   not programs, libraries and modules.
3. New files in system folders stay, unless a program, library or module of the image could be found in their place. A
   module of an interpreter of the image stays only if a package manager recorded it.
4. Files that the task's solution changed (its own footprint) stay, except links into folders of the task.
5. All other files stay, except modules that tests would import first from their working directory, and links into
   folders of the task.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import posixpath
import re
import stat
import struct

from workers.sandboxes.isolation.restoring.image_contents import (
    LIBRARY,
    SITES,
    STANDARD,
    ImageContents,
    distribution,
    plain,
    soname,
)

# imported early, because a later user of this process may not read its files; some Pythons are built without it
try:
    import sqlite3
except ImportError:
    sqlite3 = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Set
    from typing import Any


_SYSTEM = re.compile(r"(usr|bin|sbin|etc|lib(32|64|x32|exec)?)(/|$)")
_BIN = re.compile(r"(^|/)(bin|sbin|games)/[^/]+$")
_HOME = re.compile(r"(root|home/[^/]+)/")
_START_UP = re.compile(
    r"(^|/)(sitecustomize|usercustomize)(\.[^/]*)?(/|$)|(^|/)rubygems_plugin\.rb$|(^|/)(_pytest|pytest)\.py$"
    r"|(^|/)(Rprofile\.site|Renviron\.site|pybuilddir\.txt)$|(^|/)pyvenv\.cfg$|\._pth$|(^|/)python\d+\.zip$"
    r"|^etc/(ld\.so\..*|profile(\.d/.*)?|bash.*|zsh.*|environment|python[^/]*/.*|perl/.*|pip\.conf|npmrc|inputrc|gitconfig|ssl/openssl\.cnf)$"
)
_SHELL_FILES = re.compile(
    r"\.(bash_profile|bash_login|bashrc|bash_env|profile|zshenv|zshrc|zprofile|inputrc|curlrc|wgetrc|npmrc|perlrc)"
    r"|\.R(profile|environ)|\.config/pip/pip\.conf|\.pip/pip\.conf"
)
"""Files in home folders that shells and programs read when they start. They stay if the task names them."""
_LOADED = re.compile(
    r"libnss_.*|pam_.*\.so|.*/(gconv|engines[-.\d]*|ossl-modules|sasl2|security|glibc-hwcaps)/.*|.*/jre/lib/ext/.*"
)
"""Libraries that are loaded by folder or by name pattern, without a reference to them."""
_ACCOUNTS = re.compile(r"etc/(passwd|group|shadow|gshadow|subuid|subgid)-?|etc/(hosts|hostname|resolv\.conf|mtab)")
_OTHER_MODULES = re.compile(r"perl5?|site_perl|vendor_perl|ruby|site_ruby|gems|php\d*|site-library|lua")
_SCRIPTS = ("console_scripts", "gui_scripts")
_NO_SHADOW = ("test", "tests", "__main__", "__init__", "__pycache__", "conftest")
_RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "xdist", "coverage", "pytest_cov")
_TASK_FOLDERS = ("tests", "logs", "solution")
_MAX_LINKS = 40
_MAX_PTH = 4_000_000

OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


class Footprint:
    """The footprint of one layer, which is the working directory, on an image.

    `named`: paths that the task names. `programs`: commands that it runs. `records`: files of packages. `own`: paths
    that the task's solution changed.
    """

    def __init__(
        self,
        image: ImageContents,
        named: Sequence[str],
        workdir: str,
        programs: Set[str],
        records: Set[str],
        own: Sequence[str] = (),
    ) -> None:
        self._image = image
        self._own = {path.strip("/") for path in own}
        self._own_folders = tuple(path.lstrip("/") for path in own if path.endswith("/"))
        self._named = {posixpath.normpath(path).strip("/") for path in named} - {""}
        folders = {posixpath.dirname(path) for path in self._named}
        self._named_folders = self._named | {each for each in folders if each.count("/") >= 2 - each.startswith("etc/")}
        self._workdir = posixpath.normpath(workdir or "/").strip("/")
        self._programs = programs
        self._on_path: set[str] = set()
        self._records = records

    def stays(self, path: str, mode: int) -> bool:
        """Return whether a path that is not a folder stays in the layer."""
        if stat.S_ISLNK(mode) and self._leads_to_task(path):
            return False
        if self.is_own(path):
            return True
        in_image = bool(self._image.node_path(path))
        if stat.S_ISCHR(mode) and not self.is_system(path):
            # a whiteout
            return True
        if not in_image and self._is_automatic(path):
            return False
        if in_image and _START_UP.search(path):
            return False
        if home := _HOME.match(path):
            name = path[home.end() :]
            if _SHELL_FILES.fullmatch(name):
                return path in self._named
        if self.is_system(path):
            return self._stays_in_system(path, in_image=in_image)
        return in_image or path in self._named or not self._shadows(path)

    def is_own(self, path: str) -> bool:
        """Return whether a path belongs to the task's own footprint."""
        return path in self._own or path.startswith(self._own_folders)

    def is_system(self, path: str) -> bool:
        """Return whether loaders, interpreters or shells search this path by themselves."""
        parts = path.split("/")
        at = self._module_folder(parts)
        if at >= 0 and parts[at] != "node_modules" and self._image.node_path("/".join(parts[: at + 1])):
            return True
        if path.rpartition("/")[0] in self._image.bin_folders:
            return True
        if self._workdir and (path + "/").startswith(self._workdir + "/"):
            return False
        if _SYSTEM.match(path):
            return True
        if parts[0] == "opt":
            return bool(_BIN.search(path) or LIBRARY.fullmatch(parts[-1]) or at >= 0)
        return bool(_HOME.match(path) and (".local" in parts or ".cargo" in parts))

    def _stays_in_system(self, path: str, *, in_image: bool) -> bool:
        parts = path.split("/")
        at = self._module_folder(parts)
        if at >= 0:
            return self._module_stays(path, parts, at, in_image=in_image)
        if path.rpartition("/")[0] in self._image.bin_folders or _BIN.search(path):
            return not in_image and self._program_stays(path, parts[-1])
        if LIBRARY.fullmatch(parts[-1]):
            known = in_image or parts[-1] in self._image.libraries or self._has_known_soname(path)
            return not known and (path in self._records or not _LOADED.fullmatch(path))
        if in_image:
            return self._is_named(path) or bool(_ACCOUNTS.fullmatch(path))
        return not _LOADED.fullmatch(path)

    def _has_known_soname(self, path: str) -> bool:
        """Return whether `ldconfig` could take a new library for one of the image. True if unknown."""
        if os.path.islink(path):
            return not self.is_system(
                posixpath.normpath(posixpath.join("/", posixpath.dirname(path), os.readlink(path)))[1:]
            )
        name = soname(path)
        return name is None or name in self._image.libraries

    def _is_named(self, path: str) -> bool:
        parts = path.split("/")
        return any("/".join(parts[:n]) in self._named_folders for n in range(2, len(parts))) or path in self._named

    def _program_stays(self, path: str, name: str) -> bool:
        if {name, plain(name)} & self._image.programs:
            return False
        return path in self._records or not ({name, plain(name)} & self._programs)

    def _module_folder(self, parts: Sequence[str]) -> int:
        for at, name in enumerate(parts[:-1]):
            if name in (*SITES, "node_modules") or _OTHER_MODULES.fullmatch(name):
                return at
            if STANDARD.fullmatch(name) and "." in name and parts[at + 1] not in SITES:
                return at
        return -1

    def _module_stays(self, path: str, parts: Sequence[str], at: int, *, in_image: bool) -> bool:
        folder, top = parts[at], parts[at + 1]
        if in_image:
            return False
        if folder not in (*SITES, "node_modules"):
            own = folder in self._image.interpreters or not STANDARD.fullmatch(folder)
            recorded = path in self._records and not path.startswith("usr/local/")
            return not own or (recorded and parts[-1] not in self._image.sources)
        if folder == "node_modules":
            package = "/".join(parts[: at + (3 if top.startswith("@") else 2)])
            return not self._image.node_path(package) and os.path.isfile(f"{package}/package.json")
        if "-info" in top and top.rpartition(".")[2] in ("dist-info", "egg-info"):
            return distribution(top) not in self._image.distributions
        known = self._image.installed_modules | self._image.standard_modules
        if top.partition(".")[0] in known and not self._is_namespace("/".join(parts[: at + 2])):
            return False
        return top.endswith((".pth", ".egg-link")) or path in self._records

    def _is_namespace(self, package: str) -> bool:
        node_path = self._image.node_path(package)
        return bool(node_path) and os.path.isdir(node_path) and not os.path.lexists(f"{node_path}/__init__.py")

    def _is_automatic(self, path: str) -> bool:
        if _START_UP.search(path):
            # needed by a virtual environment that the policy made
            return not path.endswith("pyvenv.cfg") or self._configures_interpreter(path)
        if path.endswith(".pth"):
            return self.is_system(path) and self._pth_runs_code(path)
        folder, _, name = path.rpartition("/")
        if name != "entry_points.txt" or not folder.lower().endswith("-info"):
            return False
        # the image's interpreter does not search a virtual environment that the policy made
        site = folder.rpartition("/")[0]
        own = site.rpartition("/")[2] in SITES and not self.is_system(path) and site not in self._on_path
        return not own and _has_plugins(path)

    def _configures_interpreter(self, path: str) -> bool:
        folder = posixpath.dirname(path)
        return self.is_system(path) or any(
            folder in (each, posixpath.dirname(each)) for each in self._image.bin_folders
        )

    def read_pth(self, paths: Iterable[str]) -> None:
        """Record the folders that .pth files among these paths add to the module path of the image's interpreters."""
        for path in paths:
            if path.endswith(".pth") and self.is_system(path):
                self._pth_runs_code(path)

    def _pth_runs_code(self, path: str) -> bool:
        """Return whether a .pth file has executable lines, or adds a path that is not a folder, such as an archive."""
        text = text_of(path, _MAX_PTH)
        if not text:
            return os.path.islink(path) or (os.path.lexists(path) and os.lstat(path).st_size > 0)
        for line in text.removeprefix("\ufeff").splitlines():
            if line.startswith(("import ", "import\t")):
                return True
            if line.strip() and not line.startswith("#"):
                added = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), line.rstrip())).strip("/")
                if not os.path.isdir(added or ".") and not os.path.isdir(self._image.node_path(added)):
                    return True
                self._on_path.add(added)
        return False

    def _shadows(self, path: str) -> bool:
        """Return whether tests, run in this folder, would import this module instead of one of the image."""
        parts = path.split("/")
        if parts[-1].startswith("__init__.") and len(parts) > 1:
            parts = parts[:-1]
        stem, folder = parts[-1].partition(".")[0], "/".join(parts[:-1])
        is_module = parts[-1] != path.split("/")[-1] or path.endswith((".py", ".pyc", ".so"))
        if not is_module or stem in _NO_SHADOW:
            return False
        if (
            folder not in (self._workdir, "", "root")
            and folder not in self._named
            and not _HOME.fullmatch(folder + "/")
        ):
            return False
        if os.path.lexists(f"{folder or '.'}/__init__.py") or self._image.node_path(
            f"{folder}/__init__.py".lstrip("/")
        ):
            return False
        return stem in _RUNNERS or stem in self._image.standard_modules

    def _leads_to_task(self, path: str) -> bool:
        """Return whether a link leads into a folder of the task, also through other links."""
        if path.partition("/")[0] in _TASK_FOLDERS:
            return False
        waiting = path.split("/")[::-1]
        at: list[str] = []
        n_links = 0
        while waiting:
            name = waiting.pop()
            if name == "..":
                del at[-1:]
                continue
            if name in ("", "."):
                continue
            at.append(name)
            if at[0] in _TASK_FOLDERS:
                return True
            if at[0] == "proc" and name in ("root", "cwd"):
                # of a process of the tests
                at = self._workdir.split("/") if name == "cwd" and self._workdir else []
                continue
            current = "/".join(at)
            node_path = current if os.path.lexists(current) else self._image.node_path(current)
            if node_path and os.path.islink(node_path):
                n_links += 1
                if n_links > _MAX_LINKS:
                    return False
                target = os.readlink(node_path)
                at = [] if target.startswith("/") else at[:-1]
                waiting += target.split("/")[::-1]
        return False


def _has_plugins(path: str) -> bool:
    text = text_of(path)
    groups = re.findall(r"^\s*\[([^\]]*)\]", text, re.MULTILINE)
    return not text or any(group.strip() not in _SCRIPTS for group in groups)


def restore_footprint(
    rule: dict[str, Any], lower: Sequence[str], paths: Callable[[], Iterator[str]], remove: Callable[[str], None]
) -> list[str]:
    """Remove from the working directory all paths that do not stay, and return them.

    `rule` has the fields of `RestoredFiles`, `bin_folders` and `workdir`. Raises OSError if a folder of the image,
    `lower`, cannot be read, because all files of the layer would count as new then.
    """
    image = ImageContents(lower, rule["bin_folders"])
    layer_paths = list(paths())
    programs, records = frozenset(rule["programs"]), recorded(layer_paths)
    footprint = Footprint(image, rule["named"], rule["workdir"], programs, records, rule["footprint"])
    footprint.read_pth(layer_paths)
    removed: list[str] = []
    for path in layer_paths:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            if not footprint.stays(path, mode):
                removed.append(path)
        elif footprint.is_system(path) and not footprint.is_own(path) and not _uncover(image.node_path(path), path):
            removed.append(path)
    for path in removed:
        remove(path)
    return removed


def summary(paths: Sequence[str], max_entries: int) -> list[str]:
    """Return at most `max_entries` entries that cover these paths: paths, or folders with a `/` at the end."""
    by_depth: dict[int, set[str]] = {}
    for path in paths:
        by_depth.setdefault(path.count("/"), set()).add(f"/{path}")
    n = len(paths)
    for depth in range(max(by_depth, default=0), 0, -1):
        if n <= max_entries:
            break
        # deeper paths were replaced by these folders
        deepest, above = by_depth.pop(depth, set()), by_depth.setdefault(depth - 1, set())
        folders = {posixpath.dirname(path.rstrip("/")) for path in deepest}
        n -= len(deepest) + len(above)
        above.difference_update(folders)
        above.update(f"{folder}/" for folder in folders)
        n += len(above)
    return sorted(path for entries in by_depth.values() for path in entries)[:max_entries]


def _uncover(image_folder: str, path: str) -> bool:
    """Make a folder transparent for the image's, with its mode. Returns False if the image's path is not a folder."""
    if not image_folder:
        return True
    if os.path.islink(image_folder) or not os.path.isdir(image_folder):
        return False
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            os.removexattr(path, name, follow_symlinks=False)
    os.chmod(path, stat.S_IMODE(os.lstat(image_folder).st_mode))
    return True


# Package records. A policy can forge one, so it only lets new files stay, and none that run by themselves.
#
# rpm's database of the kind `sqlite` is read into memory with a bound on its size, SQLite runs a bounded number of
# steps on that copy, views and virtual tables are not queried, and an invalid header counts as one without files.
# `sqlite` is rpm's default since 4.16 (Fedora 33, RHEL 9). Berkeley DB (older) and `ndb` (openSUSE) are not read. A
# write-ahead log is not read either; rpm empties it at its end. `lib/header.c` of rpm describes the header.

_MAX_BYTES = 20_000_000
_OF_DPKG = "var/lib/dpkg/info/"
_OF_APK = "lib/apk/db/installed"
_OF_RPM = ("usr/lib/sysimage/rpm/rpmdb.sqlite", "var/lib/rpm/rpmdb.sqlite")

MAX_RPM_BYTES = 100_000_000
_MAX_FILES = 2_000_000
_MAX_ENTRIES = 65_535
_DIRINDEXES, _BASENAMES, _DIRNAMES = 1116, 1117, 1118
_INT32, _STRING_ARRAY = 4, 8
_TAGS = {(_BASENAMES, _STRING_ARRAY), (_DIRNAMES, _STRING_ARRAY), (_DIRINDEXES, _INT32)}
_ENTRY = struct.Struct(">iIiI")
_COUNTS = struct.Struct(">II")
_STEPS = 100_000
_MAX_INTERVALS = 1000
"""Maximum number of intervals of `_STEPS` steps. A table of a million rows needs fewer."""
_ROLLBACK = b"\1\1"
"""File format versions without a write-ahead log, which a database in memory cannot have."""
_SELECT = "SELECT blob FROM main.Packages WHERE typeof(blob) = 'blob'"
_IS_TABLE = "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'Packages' AND rootpage > 0"


def recorded(paths: Iterable[str]) -> frozenset[str]:
    """Return the files named by the package records among these paths, relative to the working directory."""
    return frozenset(name for path in paths for name in _named(path))


def _named(path: str) -> Iterator[str]:
    if path.startswith(_OF_DPKG) and path.endswith(".list"):
        yield from (line.strip("/") for line in text_of(path).splitlines())
    elif path == _OF_APK or path == f"usr/{_OF_APK}":
        folder = ""
        for line in text_of(path).splitlines():
            if line.startswith("F:"):
                folder = line[2:]
            elif line.startswith("R:"):
                yield posixpath.join(folder, line[2:])
    elif path in _OF_RPM:
        yield from files_of(_data_of(path, MAX_RPM_BYTES))
    elif path.endswith(".dist-info/RECORD"):
        site = posixpath.dirname(posixpath.dirname(path))
        with contextlib.suppress(csv.Error):
            for row in csv.reader(text_of(path).splitlines()):
                if row:
                    yield posixpath.normpath(posixpath.join("/", site, row[0])).strip("/")


def text_of(path: str, max_bytes: int = _MAX_BYTES) -> str:
    """Return the text of a file that the policy can have written; empty if it is unreadable or too large."""
    return _data_of(path, max_bytes).decode("utf-8", "surrogateescape")


def _data_of(path: str, max_bytes: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        return b""
    return data if len(data) <= max_bytes else b""


def files_of(data: bytes) -> Iterator[str]:
    """Yield the recorded paths, without a leading slash. Yields nothing if the database cannot be read."""
    files = itertools.chain.from_iterable(map(_files, _bounded(_headers(data), len(data))))
    return itertools.islice(files, _MAX_FILES)


def _bounded(headers: Iterator[bytes], n_bytes: int) -> Iterator[bytes]:
    """Yield headers while their total size is at most the database's; forged ones can overlap."""
    for header in headers:
        n_bytes -= len(header)
        if n_bytes < 0:
            return
        yield header


def _headers(data: bytes) -> Iterator[bytes]:
    if sqlite3 is None or not hasattr(sqlite3.Connection, "deserialize"):
        return
    intervals = itertools.count()
    with contextlib.closing(sqlite3.connect(":memory:")) as database, contextlib.suppress(sqlite3.Error, ValueError):
        # a column can be an expression
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, len(data))
        database.deserialize(data[:18] + _ROLLBACK + data[20:])
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA query_only = ON")
        database.set_progress_handler(lambda: next(intervals) >= _MAX_INTERVALS, _STEPS)
        if database.execute(_IS_TABLE).fetchone():
            for (header,) in database.execute(_SELECT):
                yield header


def _files(header: bytes) -> Iterator[str]:
    try:
        n_entries, n_bytes = _COUNTS.unpack_from(header)
        store = _COUNTS.size + n_entries * _ENTRY.size
        if n_entries > _MAX_ENTRIES or store + n_bytes > len(header):
            return
        entries = [_ENTRY.unpack_from(header, _COUNTS.size + n * _ENTRY.size) for n in range(n_entries)]
        entries_by_tag = {
            tag: (offset, count) for tag, kind, offset, count in entries if (tag, kind) in _TAGS and offset >= 0
        }
        names, folders = (_strings(header, store, *entries_by_tag[tag]) for tag in (_BASENAMES, _DIRNAMES))
        offset, count = entries_by_tag[_DIRINDEXES]
        indexes = struct.unpack_from(f">{count}I", header, store + offset)
    except (struct.error, KeyError, MemoryError):
        return
    for name, index in zip(names, indexes, strict=False):
        if index < len(folders):
            yield posixpath.normpath(posixpath.join("/", folders[index], name)).strip("/")


def _strings(header: bytes, store: int, offset: int, count: int) -> list[str]:
    if count > len(header):
        return []
    parts = header[store + offset :].split(b"\0", count)
    return [part.decode("utf-8", "surrogateescape") for part in parts[:count]]
