"""The scored part of a policy's patch: everything except changes that decide whether tests pass.

Dropped are changes of the tests and of files that configure their runner, by the rules of `tree_guard.py` and, as these
data sets are not only in Python, by the usual names of tests and of runners' settings. Changes that the reference
solution makes, too, are kept, unless they are in a test of the issue.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from workers.evaluators.tree_guard import folder_of_tests, steers

_SECTION = re.compile(rb"^diff --git ", re.MULTILINE)
_PATHS = re.compile(rb"^(?:\+\+\+|---) (?:\"?[ab]/(.*?)\"?)\t?$", re.MULTILINE)
_HEADER = re.compile(rb'^diff --git (?:"?a/(.*?)"?) (?:"?b/(.*?)"?)$')
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_PLAIN = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}
_TEST = re.compile(
    r"(?:^|/)(?:test_[^/]*\.py|[^/]*_test\.(?:py|go)|tests?\.py|[^/]*\.(?:test|spec)\.[cm]?[jt]sx?|[^/]*_spec\.rb)$"
)
_RUNNERS = re.compile(
    r"(?:^|/)(?:jest|vitest|karma|playwright|cypress|babel)\.(?:config|conf|setup)[^/]*$"
    r"|(?:^|/)\.?(?:mocharc|rspec|nycrc)[^/]*$|(?:^|/)phpunit\.xml[^/]*$|(?:^|/)noxfile\.py$|(?:^|/)runtests\.py$|^r2e_tests(?:/|$)|^run_tests\.sh$"
)
_TOOLS = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "nose", "hypothesis", "tox", "coverage"}
_NAMES = {name.lower() for name in (*sys.stdlib_module_names, *_TOOLS)}
_ROOTS = ("", "src/", "lib/", "tests/")


@dataclass(frozen=True, slots=True)
class KeptChanges:
    """The scored patch, and the paths whose changes were dropped."""

    patch: bytes
    dropped: list[str] = field(default_factory=list)


def kept_changes(patch: bytes, tests: Collection[str], gold: Collection[str]) -> KeptChanges:
    """Return a patch without the changes of protected paths; `tests` are the issue's, `gold` the solution's paths."""
    folders = {folder for folder in map(folder_of_tests, tests) if folder}
    before, *sections = _parts(patch)
    kept, dropped = [before], []
    for section in sections:
        paths = paths_of(section)
        if any(_protected(path, section, tests, folders, gold) for path in paths):
            dropped += paths
        else:
            kept.append(section)
    return KeptChanges(b"".join(kept), list(dict.fromkeys(dropped)))


def paths_of_patch(patch: bytes) -> list[str]:
    """Return all paths that a patch names, each once."""
    return list(dict.fromkeys(path for section in _parts(patch)[1:] for path in paths_of(section)))


def _parts(patch: bytes) -> list[bytes]:
    starts = [match.start() for match in _SECTION.finditer(patch)]
    return [patch[start:end] for start, end in pairwise([0, *starts, len(patch)])]


def paths_of(section: bytes) -> list[str]:
    """Return the paths that one file's section of a patch names, without git's quoting."""
    line, _, rest = section.partition(b"\n")
    header = _HEADER.match(line)
    names = [name for name in (header.groups() if header else ()) if name]
    names += _PATHS.findall(rest.partition(b"\n@@")[0])
    return list(dict.fromkeys(_unquoted(name) for name in names))


def _unquoted(name: bytes) -> str:
    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _PLAIN.get(code, code)

    return _ESCAPE.sub(plain, name).decode("utf-8", "replace")


def _protected(
    path: str, section: bytes, tests: Collection[str], folders: Collection[str], gold: Collection[str]
) -> bool:
    parts = path.split("/")
    if ".git" in parts or ".." in parts or path.startswith("/"):
        return True
    if path in tests or any(path == folder or path.startswith(f"{folder}/") for folder in folders):
        return True
    if path in gold:
        return False
    # A link in place of a folder would redirect the tests.
    if any(test.startswith(f"{path}/") for test in tests):
        return True
    return bool(steers(path) or _TEST.search(path) or _RUNNERS.search(path) or _shadows(path, section))


def _shadows(path: str, section: bytes) -> bool:
    """Return True for a new module with the name of one that the tests' runner imports."""
    if b"\nnew file mode " not in section:
        return False
    below = [path.removeprefix(root) for root in _ROOTS if path.startswith(root)]
    return any(name.split("/")[0].split(".")[0].lower() in _NAMES for name in below)
