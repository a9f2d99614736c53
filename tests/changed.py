"""Runs the tests that a change can affect, as `make test-changed` does.

The change is the difference from the commit at which the branch left its base, including uncommitted files. A test file
is affected if it imports a changed module, directly or not, or if a row of `BY_PROCESSES` names it: tests start
workers, the API and the command line as processes, which imports do not show.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grimp

from farm.python_syntax import parsed

ROOT = Path(__file__).parents[1]
PACKAGES = ("farm", "workers", "testkit", "tests", "benchmarks")
SUITES = ("tests/unit", "tests/contract", "tests/integration", "tests/acceptance", "benchmarks")
ALWAYS = ("tests/test_architecture.py", "tests/test_layout.py", "tests/test_words.py")
EVERYTHING = ("pyproject.toml", "requirements.lock", "requirements-runtime.lock", "tests/conftest.py")
"""A change of these can affect every test."""

_FARMS = ("tests/integration/test_farm.py", "tests/acceptance/test_commands.py", "tests/acceptance/faults/test_kill.py")
_STORE = ("tests/contract/store", "tests/contract/reports", "tests/contract/retention", "tests/integration/stores")
_SANDBOXES = ("tests/contract/sandboxes", "tests/integration/sandboxes", "tests/acceptance/sandboxes")
_API = ("tests/integration/api", "tests/integration/test_api.py", "tests/contract/protocols")
_ENGINES = ("tests/contract/test_engine.py", "tests/contract/test_engine_kinds.py", "tests/integration/engines")
_SCORES = (
    "tests/integration/answers",
    "tests/integration/scores",
    "tests/integration/test_task_pages.py",
    "tests/acceptance/scores",
)
_TASKS = ("tests/integration/tasks", "tests/acceptance/tasks", "tests/integration/test_task_pages.py")
_KILLS = ("tests/acceptance/faults", "tests/acceptance/test_drain.py", "tests/acceptance/test_nodes.py")
_DOCS = ("tests/unit/test_docs.py", "tests/unit/test_map.py", "tests/unit/test_reference_pages.py")

BY_PROCESSES: Mapping[str, tuple[str, ...]] = {
    "farm": _FARMS,
    "farm.adapters": ("tests/contract/test_adapters.py", "tests/acceptance/test_delivery.py"),
    "farm.api": (*_API, "tests/acceptance/protocols", "tests/acceptance/faults/test_api_killed.py"),
    "farm.cli": (
        "tests/acceptance/test_commands.py",
        "tests/integration/test_bad_input.py",
        "tests/acceptance/test_demo.py",
    ),
    "farm.client": (*_API, "tests/acceptance/test_delivery.py", "tests/acceptance/faults/test_api_killed.py"),
    "farm.collecting": ("tests/integration/collecting", "tests/acceptance/test_delivery.py"),
    "farm.configuration": ("tests/integration/test_bad_input.py",),
    "farm.embedded": ("tests/acceptance/faults/test_embedded_healing.py", "tests/acceptance/test_demo.py"),
    "farm.evaluation": ("tests/integration/test_eval_command.py",),
    "farm.launch": ("tests/acceptance/test_head.py", "tests/acceptance/test_nodes.py"),
    "farm.metrics": ("tests/integration/test_oversight.py",),
    "farm.notifications": ("tests/integration/test_notifications.py", "tests/acceptance/faults/test_broker_faults.py"),
    "farm.observing": ("tests/integration/observing", "tests/integration/test_oversight.py"),
    "farm.retry_policy": ("tests/acceptance/faults/test_causes.py", "tests/acceptance/faults/test_hangs.py"),
    "farm.scheduler": (*_KILLS, "tests/integration/stores", "tests/acceptance/test_overload.py"),
    "farm.store": (*_STORE, "tests/acceptance/faults/test_store_faults.py", "tests/acceptance/faults/test_kill.py"),
    "farm.tasks": _TASKS,
    "farm.web": ("tests/integration/web",),
    "workers": (*_FARMS, *_SCORES),
    "workers.attacks": ("tests/acceptance/tasks", "tests/acceptance/scores"),
    "workers.agents": ("tests/acceptance/scores/test_harness.py", "tests/acceptance/scores/test_trust.py"),
    "workers.cli": (*_TASKS, "tests/contract/sandboxes/test_image_cache.py"),
    "workers.conformance": ("tests/contract/sandboxes",),
    "workers.environments": ("tests/integration/environments", "tests/contract/test_environments.py"),
    "workers.evaluators": (*_SCORES, "tests/acceptance/test_demo.py"),
    "workers.handlers": (*_SCORES, *_TASKS),
    "workers.lending": ("tests/acceptance/sandboxes", "tests/acceptance/protocols/test_swe_rex.py"),
    "workers.node": (
        *_KILLS,
        "tests/integration/test_worker_fork_server.py",
        "tests/integration/test_sigterm_to_all.py",
    ),
    "workers.policy": (
        *_ENGINES,
        "tests/acceptance/scores/test_harness.py",
        "tests/acceptance/test_weight_updates.py",
    ),
    "workers.process": (*_KILLS, "tests/integration/test_cancel.py", "tests/acceptance/test_cancel.py"),
    "workers.proofs": ("tests/acceptance/test_proofs.py", "tests/acceptance/test_commands.py"),
    "workers.queue": (*_KILLS, "tests/integration/test_worker_fork_server.py", "tests/acceptance/test_cancel.py"),
    "workers.row_forms": _SCORES,
    "workers.sandboxes": (
        *_SANDBOXES,
        "tests/integration/scores",
        "tests/acceptance/scores",
        "tests/acceptance/faults/test_leftovers.py",
    ),
    "workers.plugins": (*_SCORES, "tests/integration/test_plugins.py"),
    "workers.stages": (*_SCORES, "tests/integration/test_plugins.py", "tests/acceptance/test_cancel.py"),
    "workers.testing": (*_ENGINES, "tests/acceptance/test_demo.py"),
    "workers.tools": ("tests/integration/sandboxes", "tests/contract/sandboxes/test_sandbox_tools.py"),
    "tests.chaos": ("tests/acceptance/faults/test_chaos.py",),
    "tests.doubles": _ENGINES,
    "tests.services": _FARMS,
    "examples": (
        "tests/unit/examples",
        "tests/acceptance/test_python_environment.py",
        "tests/acceptance/test_demo.py",
        "tests/acceptance/test_docs_examples.py",
    ),
}
"""Packages and modules, and the tests that run them in separate processes: the longest name counts."""

BY_FOLDER: Mapping[str, tuple[str, ...]] = {
    ".ci": ("tests/unit/test_makefile.py",),
    "CHANGELOG.md": _DOCS,
    "CONTRIBUTING.md": _DOCS,
    "Makefile": ("tests/unit/test_makefile.py", *_DOCS),
    "README.md": (*_DOCS, "tests/acceptance/test_docs_examples.py"),
    "alembic": _STORE,
    "deploy": ("tests/unit/test_slurm.py", "tests/integration/observing/test_deployed_monitoring.py"),
    "docker": ("tests/unit/test_docker.py",),
    "docs": (*_DOCS, "tests/acceptance/test_docs_examples.py"),
    "mkdocs.yml": _DOCS,
}
"""Files outside packages, and the tests that read or run them."""


@dataclass
class Selection:
    """Test files, relative to the root, with the reasons for each; or all of them."""

    files: dict[str, set[str]] = field(default_factory=dict)
    everything_for: str = ""

    def add(self, files: Iterable[str], reason: str) -> None:
        for file in files:
            self.files.setdefault(file, set()).add(reason)


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from where HEAD left `base`, untracked ones included, relative to the root.

    Exits with git's message if git fails, for example for an unknown base.
    """
    start = _git(root, "merge-base", "HEAD", base).strip()
    listed = _git(root, "diff", "--name-only", "--no-renames", "-z", start)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted(filter(None, {*listed.split("\0"), *untracked.split("\0")}))


def selected(changed: Iterable[str]) -> Selection:
    """Return the test files that a change of these files can affect."""
    result = Selection()
    modules: set[str] = set()
    for path in changed:
        if path in EVERYTHING:
            result.everything_for = path
            return result
        modules |= _modules_of(path)
        if _is_test_file(Path(path)) and (ROOT / path).exists():
            result.add([path], path)
        if path.endswith("/conftest.py"):
            result.add(_tests_in(str(Path(path).parent)), path)
        if row := _row(BY_FOLDER, path, "/"):
            result.add((file for each in BY_FOLDER[row] for file in _tests_in(each)), row)
    for module in modules:
        result.add(importing(module), module)
        if row := _row(BY_PROCESSES, module, "."):
            result.add((file for each in BY_PROCESSES[row] for file in _tests_in(each)), f"processes of {row}")
    result.add(ALWAYS, "always")
    return result


def _modules_of(path: str) -> set[str]:
    """Return the module that a changed file is, or those of its folder that mention its name, else all of them."""
    file = Path(path)
    if file.parts[0] not in (*PACKAGES, "examples") or _is_test_file(file):
        return set()
    if file.suffix == ".py":
        return {_name(file)}
    folder = file.parent
    while len(folder.parts) > 1 and not list((ROOT / folder).glob("*.py")):
        folder = folder.parent
    beside = [each.relative_to(ROOT) for each in (ROOT / folder).glob("*.py")]
    named = [each for each in beside if file.name in (ROOT / each).read_text(encoding="utf-8")]
    return {_name(each) for each in named or beside if not _is_test_file(each)}


def importing(module: str) -> Iterator[str]:
    """Return the test files that import a module, directly or not, or whose fixtures do."""
    graph = _graph()
    affected = {module}
    if module in graph.modules:
        affected |= graph.find_downstream_modules(module)
    for file in _test_files():
        if not affected.isdisjoint(_imports(file)):
            yield file
    for suite in SUITES:
        for conftest in (ROOT / suite).rglob("conftest.py"):
            path = str(conftest.relative_to(ROOT))
            if not affected.isdisjoint(_imports(path)):
                yield from _tests_in(str(Path(path).parent))


@cache
def _graph() -> grimp.ImportGraph:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    # their names are loaded at their first use
    for module in _imports("farm/__init__.py"):
        graph.add_import(importer="farm", imported=module)
    return graph


@cache
def _imports(path: str) -> frozenset[str]:
    """Return the modules that a file imports anywhere in it, by their names and as members of their packages."""
    result: set[str] = set()
    for node in ast.walk(parsed((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            result.add(node.module)
            result.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(result)


@cache
def _test_files() -> tuple[str, ...]:
    found = [path for suite in SUITES for path in (ROOT / suite).rglob("test_*.py")]
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found)) + ALWAYS


def _tests_in(path: str) -> list[str]:
    return [file for file in _test_files() if file == path or file.startswith(f"{path}/")]


def _is_test_file(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py" and path.parts[0] in ("tests", "benchmarks")


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _row(table: Mapping[str, object], name: str, separator: str) -> str:
    fitting = [row for row in table if name == row or name.startswith(row + separator)]
    return max(fitting, key=len, default="")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"make test-changed: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Print the selection with its reasons, then run it; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", default="main", help="the branch or commit that the change is compared with")
    parser.add_argument("--list", action="store_true", help="print the test files, and run none")
    options, rest = parser.parse_known_args(arguments)
    changed = changed_files(options.base)
    if not changed:
        print(f"nothing differs from {options.base}")
        return 0
    selection = selected(changed)
    if selection.everything_for:
        print(f"{selection.everything_for} has changed: every test is run")
        files = list(SUITES) + list(ALWAYS)
    else:
        files = sorted(selection.files)
        print(f"{len(files)} of {len(_test_files())} test files, for {len(changed)} changed files:")
        for reason in sorted({reason for reasons in selection.files.values() for reason in reasons}):
            print(f"  {sum(reason in reasons for reasons in selection.files.values()):4}  {reason}")
    if options.list:
        print(*files, sep="\n")
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as named:
        named.write("\n".join(files))
        named.flush()
        return subprocess.run(
            [sys.executable, "-m", "pytest", f"@{named.name}", *rest], cwd=ROOT, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
