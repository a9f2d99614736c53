"""The scored part of a policy's patch: the fix is kept, and changes that affect the tests are dropped."""

from __future__ import annotations

import pytest

from workers.evaluators.issues.kept_changes import kept_changes, paths_of, paths_of_patch

TESTS = {"tests/test_plural.py", "pkg/test_beside.py", "web/src/app.test.js"}


def section(path: str, new: bool = False) -> bytes:
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if new else "")
    before = "/dev/null" if new else f"a/{path}"
    return f"{head}--- {before}\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode()


FIX = section("pkg/core.py")


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("tests/test_plural.py", False),
        ("tests/conftest.py", True),
        ("tests/helpers/data.json", True),
        ("conftest.py", True),
        ("pkg/conftest.py", True),
        ("pytest.ini", True),
        ("tox.ini", False),
        ("sitecustomize.py", True),
        ("src/usercustomize.py", True),
        ("evil.pth", True),
        ("evil-1.dist-info/entry_points.txt", True),
        ("pkg/__pycache__/core.cpython-311.pyc", True),
        ("pytest.py", True),
        ("_pytest/runner.py", True),
        ("json/__init__.py", True),
        ("src/unittest.py", True),
        ("tests", True),
        (".git/hooks/post-checkout", True),
        ("sub/.git/config", True),
        ("../outside.py", True),
        (".gitattributes", True),
        ("jest.config.js", False),
        ("karma.conf.js", False),
        (".mocharc.yml", True),
        ("pkg/core_test.go", True),
        ("web/src/other.spec.ts", True),
        ("web/src/app.test.js", False),
        ("pkg/test_more.py", True),
        ("r2e_tests/test_1.py", False),
        ("run_tests.sh", False),
    ],
)
def test_changes_that_affect_the_tests_are_dropped(path: str, new: bool) -> None:
    kept = kept_changes(FIX + section(path, new), TESTS, ())
    assert kept.patch == FIX
    assert kept.dropped == [path]


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("pkg/core.py", False),
        ("pkg/new_module.py", True),
        ("pkg/json.py", True),
        ("docs/testing.md", True),
        ("setup.py", False),
        ("pyproject.toml", False),
        ("pkg/latest.py", True),
        ("helpers.py", True),
    ],
)
def test_fix_is_kept(path: str, new: bool) -> None:
    patch = FIX + section(path, new)
    assert kept_changes(patch, TESTS, ()).patch == patch


def test_files_changed_by_the_solution_are_kept() -> None:
    patch = section("tox.ini") + section("tests/test_plural.py")
    kept = kept_changes(patch, TESTS, ("tox.ini", "tests/test_plural.py"))
    assert kept.patch == section("tox.ini")
    assert kept.dropped == ["tests/test_plural.py"]


def test_quoted_names_are_read_like_git() -> None:
    quoted = b'diff --git "a/te\\163ts/caf\\303\\251.py" "b/te\\163ts/caf\\303\\251.py"\nindex 1..2\n'
    assert paths_of(quoted) == ["tests/café.py"]
    assert kept_changes(FIX + quoted, TESTS, ()).patch == FIX


def test_content_line_does_not_begin_a_section() -> None:
    patch = FIX + b" diff --git a/x b/tests/x\n"
    assert kept_changes(patch, TESTS, ()).patch == patch
    assert paths_of_patch(FIX + section("a b.py")) == ["pkg/core.py", "a b.py"]


def test_renamed_test_is_dropped() -> None:
    moved = (
        b"diff --git a/tests/test_plural.py b/pkg/plain.py\nsimilarity index 100%\nrename from tests/test_plural.py\n"
    )
    assert kept_changes(FIX + moved, TESTS, ()).patch == FIX


@pytest.mark.parametrize("patch", [b"", b"\n", b"no patch\n"])
def test_patch_without_sections_names_no_files(patch: bytes) -> None:
    assert paths_of_patch(patch) == []
    kept = kept_changes(patch, TESTS, ())
    assert (kept.patch, kept.dropped) == (patch, [])
