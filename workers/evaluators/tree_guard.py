"""Reverts forbidden changes in a patched tree; sent into sandboxes as text, it imports nothing of the farm.

The rule: code that decides whether a test passed is never the policy's. Of the paths that a patch changed, these are
restored from the clean tree, or removed if missing there: everything below the folders of the tests; files outside the
code that configure pytest or Python; metadata by which Python finds plug-ins; compiled code; new modules with the name
of one that Python would find elsewhere; and settings files if their settings of pytest changed. A link that obstructs
one of these is removed.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TESTS = {"test", "tests", "testing", "unit_tests", "unittests", "t"}
_STEERING = {
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"),
    *("sitecustomize.py", "usercustomize.py", "pyvenv.cfg", ".coveragerc", ".gitattributes", ".gitmodules"),
}
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".egg", ".pth")
_COMPILED = (".pyc", ".pyo", ".pyd")
_ROOTS = ("", "src", "lib")
SETTINGS_FILES = ("pyproject.toml", "setup.cfg")
"""Files with a section for pytest."""


def survey(tree: Path, pythonpath: str) -> dict[str, Any]:
    """Return the modules that Python finds without the tree, pytest's plug-ins, and missing programs."""
    from importlib.metadata import distributions

    absent = "" if shutil.which("git") else "git is missing"
    if importlib.util.find_spec("pytest") is None:
        absent = "pytest is missing from the environment"
    # Before Python 3.10 it has no list of its own modules, but finds all except the built-in ones.
    names = {*getattr(sys, "stdlib_module_names", sys.builtin_module_names)} | {
        module.name for module in pkgutil.iter_modules(sys.path)
    }
    path = [str(tree / pythonpath), str(tree), *sys.path]
    plugins = [
        entry.name
        for distribution in distributions(path=path)
        for entry in distribution.entry_points
        if entry.group == "pytest11"
    ]
    return {"names": sorted(names), "plugins": list(dict.fromkeys(plugins)), "missing": absent}


def folder_of_tests(test: str) -> str:
    """Return the folder of tests that contains a test's path; empty if the test is among the code."""
    parts = test.split("/")[:-1]
    for depth, part in enumerate(parts, 1):
        if part.lower() in _TESTS:
            return "/".join(parts[:depth])
    return ""


def steers(path: str) -> bool:
    """Return True if a file by this name decides what runs: it configures pytest or Python, or is compiled code."""
    parts = path.split("/")
    name = parts[-1].lower()
    return (
        name in _STEERING
        or any(part.lower().endswith(_METADATA) for part in parts)
        or name.endswith(_COMPILED)
        or "__pycache__" in parts
    )


class TreeGuard:
    """The patched tree; `names` are those of modules that Python finds elsewhere, `tests` the paths of tests."""

    def __init__(self, tree: Path, baseline: str, pythonpath: str, names: Iterable[str], tests: Iterable[str]) -> None:
        self._tree = tree
        self._baseline = baseline
        self._names = {name.lower() for name in names}
        self._tests = {_plain(test) for test in tests}
        self._folders = {folder for folder in map(folder_of_tests, self._tests) if folder}
        self._roots = {_plain(root) for root in (*_ROOTS, *pythonpath.split(":"))}

    def is_ours(self, path: str) -> bool:
        """Return True if a changed path must be restored."""
        return (
            path in self._tests
            or any(_below(path, folder) or _below(folder, path) for folder in self._folders)
            or any(_below(test, path) for test in self._tests)
            or steers(path)
            or self._shadows(path)
            or self._steers(path)
        )

    def _shadows(self, path: str) -> bool:
        for root in self._roots:
            below = path[len(root) + 1 :] if root and _below(path, root) else path if not root else ""
            first = below.split("/")[0]
            module = first.split(".")[0]
            if module.lower() in self._names:
                stem = f"{root}/{module}".lstrip("/")
                if not self._git("ls-tree", "--name-only", self._baseline, "--", stem, f"{stem}.py").strip():
                    return True
        return False

    def _steers(self, path: str) -> bool:
        name = path.rsplit("/", 1)[-1]
        if name not in SETTINGS_FILES:
            return False
        before = self._git("show", f"{self._baseline}:{path}")
        try:
            after = (self._tree / path).read_text()
        except (OSError, ValueError):
            after = ""
        try:
            return bool(pytest_settings(name, before) != pytest_settings(name, after))
        except (ValueError, configparser.Error):
            return True

    def restore(self, changed: Iterable[str]) -> list[str]:
        """Restore the protected ones of the changed paths, and the tests themselves; return the former."""
        protected = [path for path in changed if self.is_ours(path)]
        for path in (*protected, *self._tests):
            self._clear(path)
        for path in (*protected, *self._folders, *self._tests):
            if self._git("ls-tree", self._baseline, "--", path):
                self._git("checkout", "-q", self._baseline, "--", path, check=True)
        return protected

    def _clear(self, path: str) -> None:
        """Remove a path, and a link or a file in place of one of the clean tree's folders."""
        at = self._tree
        parts = path.split("/")
        for depth, part in enumerate(parts, 1):
            at = at / part
            last = depth == len(parts)
            if at.is_symlink() or (at.exists() and not at.is_dir()):
                is_given = self._git("ls-tree", self._baseline, "--", "/".join(parts[:depth])).startswith("120000")
                if last or not is_given:
                    at.unlink()
                return
        if at.is_dir() and not self._git("ls-tree", self._baseline, "--", path).startswith("040000"):
            shutil.rmtree(at, ignore_errors=True)

    def _git(self, *arguments: str, check: bool = False) -> str:
        command = ["git", "--literal-pathspecs", *arguments]
        done = subprocess.run(command, cwd=self._tree, capture_output=True, check=check)
        return done.stdout.decode("utf-8", "surrogateescape")


def changed_paths(names: Path, numbers: Path) -> list[str]:
    """Return the paths in a file of names, and in git's numstat output if it exists; both separated by NUL."""
    paths = names.read_bytes().split(b"\0")
    if numbers.exists():
        paths += [line.split(b"\t", 2)[-1] for line in numbers.read_bytes().split(b"\0")]
    return list(dict.fromkeys(os.fsdecode(path) for path in paths if path))


def _plain(path: str) -> str:
    plain = os.path.normpath(path)
    return "" if plain == "." else plain


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def pytest_settings(name: str, text: str) -> Any:
    """Return pytest's and its plug-ins' settings in pyproject.toml or setup.cfg. ValueError, configparser.Error."""
    if name == "pyproject.toml":
        try:
            import tomllib
        except ImportError:
            # Before Python 3.11; then any change of the file counts as a change of pytest's settings.
            return text
        tools = tomllib.loads(text).get("tool", {})
        return {tool: config for tool, config in tools.items() if tool in ("pytest", "coverage", "tox")}
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return {section: dict(parser[section]) for section in parser.sections() if section.startswith(("tool:", "pytest"))}


def main() -> None:
    request = json.load(sys.stdin)
    tree = Path(request["tree"])
    if request["do"] == "survey":
        answer = survey(tree, request["pythonpath"])
    else:
        changed = changed_paths(Path(request["changed"]), Path(f"{request['changed']}.numstat"))
        guard = TreeGuard(tree, request["baseline"], request["pythonpath"], request["names"], request["tests"])
        answer = {"restored": [os.fsencode(path).decode("utf-8", "replace") for path in guard.restore(changed)]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
