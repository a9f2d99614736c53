"""The guard of a patched tree: files that affect the tests are restored, the fix itself is kept."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.scores.swe_hacks import BESIDE
from tests.integration.scores.swe_project import FILES, GOLD, Project
from workers.evaluators.patches import BASELINE, GIT_ENV, script
from workers.evaluators.tree_guard import TreeGuard, changed_paths, folder_of_tests, survey

HARMLESS = re.compile(
    r"calc/\w+(\.py)?|evil_plugin\.py|evil/calc/core\.py|easy\.py|other/test_core\.py|checks/test_core\.py|python"
    r"|\.gitignore|calc/pytest\.py|helpers\.py"
)
"""Files that affect no test in their location: they are not loaded before the code under test."""
TESTS = ["tests/test_core.py"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    seen = survey(tmp_path_factory.mktemp("empty"), ".")
    assert {"timeout", "xdist"} <= set(seen["plugins"])
    return list(seen["names"])


def sh(tree: Path, command: str) -> None:
    subprocess.run(["bash", "-c", command], cwd=tree, env={**GIT_ENV, "PATH": "/usr/bin:/bin"}, check=True)


def guarded(tmp_path: Path, patch: bytes, names: list[str], files: dict[str, str] = FILES) -> Path:
    tree = tmp_path / "tree"
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    sh(tree, script("commit_baseline"))
    if patch:
        (tmp_path / "patch").write_bytes(patch)
        sh(tree, "git apply --whitespace=nowarn ../patch; git apply -z --numstat ../patch > ../names.numstat")
    sh(tree, f"git diff --name-only -z --no-renames {BASELINE} > ../names")
    changed = changed_paths(tmp_path / "names", tmp_path / "names.numstat")
    TreeGuard(tree, BASELINE, ".", names, TESTS).restore(changed)
    return tree


def different(tree: Path, files: dict[str, str] = FILES) -> set[str]:
    """Return the paths that differ from the given files."""
    there = {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(tree).parts
    }
    links = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_symlink()}
    return links | {path for path in {*there, *files} if there.get(path) != files.get(path, "").encode()}


@pytest.mark.parametrize("name", BESIDE)
def test_patch_leaves_no_file_that_affects_the_tests(
    name: str, tmp_path: Path, project: Project, names: list[str]
) -> None:
    tree = guarded(tmp_path, project.patch(BESIDE[name]), names)
    assert {path for path in different(tree) if not HARMLESS.fullmatch(path)} == set()
    assert (tree / "tests/test_core.py").read_text() == FILES["tests/test_core.py"]


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        (GOLD, {"calc/core.py"}),
        ("echo x > calc/new.py; mkdir -p docs; echo x > docs/a.rst", {"calc/new.py", "docs/a.rst"}),
        (
            "mkdir calc/types; echo x > calc/types/__init__.py; echo x > calc/json.py",
            {"calc/types/__init__.py", "calc/json.py"},
        ),
        (
            "echo 'license = \"MIT\"' >> pyproject.toml; echo 'author = me' >> setup.cfg",
            {"pyproject.toml", "setup.cfg"},
        ),
        ("echo x > helpers_of_calc.py; echo x > Makefile", {"helpers_of_calc.py", "Makefile"}),
        ("git mv calc/core.py calc/sums.py", {"calc/core.py", "calc/sums.py"}),
    ],
)
def test_patch_keeps_files_that_affect_no_test(
    edit: str, kept: set[str], tmp_path: Path, project: Project, names: list[str]
) -> None:
    assert different(guarded(tmp_path, project.patch(edit), names)) == kept


def test_module_with_the_name_of_an_installed_one_may_be_patched(
    tmp_path: Path, project: Project, names: list[str]
) -> None:
    files = {**FILES, "pluggy/__init__.py": "A = 1\n", "json.py": "B = 1\n"}
    more = project.patch("mkdir pluggy; echo x > pluggy/new.py")
    assert different(guarded(tmp_path, more, names, files), files) == {"pluggy/new.py"}


@pytest.mark.parametrize(
    ("test", "folder"),
    [
        ("tests/unit/test_a.py", "tests"),
        ("pkg/tests/test_a.py", "pkg/tests"),
        ("src/pkg/test/deep/test_a.py", "src/pkg/test"),
        ("pkg/test_a.py", ""),
        ("test_a.py", ""),
        ("tests.py", ""),
    ],
)
def test_folder_of_tests(test: str, folder: str) -> None:
    assert folder_of_tests(test) == folder
