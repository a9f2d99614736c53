"""`make test-changed` selects the tests that a change can affect, by imports and through processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed

ROOT = Path(__file__).parents[2]


def files(*paths: str) -> set[str]:
    selection = changed.selected(paths)
    assert not selection.everything_for
    return set(selection.files)


def test_every_row_names_an_existing_package_and_existing_tests() -> None:
    for name in changed.BY_PROCESSES:
        package = ROOT / name.replace(".", "/")
        assert package.is_dir() or package.with_suffix(".py").is_file(), name
    for name in changed.BY_FOLDER:
        assert (ROOT / name).exists(), name
    for paths in (*changed.BY_PROCESSES.values(), *changed.BY_FOLDER.values()):
        for path in paths:
            assert (ROOT / path).exists(), path


def test_every_package_has_its_own_row() -> None:
    """Otherwise its processes would be those of `farm` or `workers`: the three files that start a whole farm."""
    packages = [path.parent for root in ("farm", "workers") for path in (ROOT / root).glob("*/__init__.py")]
    named = {".".join(path.relative_to(ROOT).parts) for path in packages}
    small = {"farm.records", "farm.rows"}
    assert named - changed.BY_PROCESSES.keys() <= small


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("farm/retry_policy.py", ["tests/unit/farm/test_retry_policy.py", "tests/acceptance/faults/test_causes.py"]),
        ("farm/client/connect.py", ["tests/integration/test_api.py"]),
        ("workers/evaluators/collect_difference.sh", ["tests/acceptance/scores/test_swe_hacks.py"]),
        ("workers/evaluators/grader.py", ["tests/integration/answers/test_answer.py"]),
        ("tests/services/farms.py", ["tests/acceptance/test_cancel.py", "tests/integration/test_farm.py"]),
        ("tests/integration/answers/conftest.py", ["tests/integration/answers/test_equality.py"]),
        ("tests/unit/farm/test_ids.py", ["tests/unit/farm/test_ids.py"]),
        ("alembic/versions/0001_first_tables.py", ["tests/contract/store/test_store.py"]),
        ("docs/concepts/map.md", ["tests/unit/test_map.py", "tests/unit/test_docs.py"]),
        ("examples/demo.py", ["tests/acceptance/test_demo.py"]),
        ("benchmarks/overload.py", ["benchmarks/test_overload.py"]),
        ("farm/api/gone.py", ["tests/integration/api/test_keys.py"]),
    ],
)
def test_change_selects_the_affected_tests(path: str, reached: list[str]) -> None:
    found = files(path)
    assert set(reached) | set(changed.ALWAYS) <= found
    assert "tests/unit/test_docker.py" not in found


def test_lazily_loaded_names_of_the_package_are_imports() -> None:
    """A test with `import farm` uses the modules of the names that it takes from it."""
    assert "tests/acceptance/test_cancel.py" in set(changed.importing("farm.client.farm"))


def test_change_of_a_shared_file_selects_every_test() -> None:
    for path in changed.EVERYTHING:
        assert (ROOT / path).exists()
        assert changed.selected(["README.md", path]).everything_for == path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=folder, check=True)


def test_committed_and_uncommitted_changes_are_found(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for name in ("kept", "edited", "removed", "renamed"):
        (tmp_path / name).write_text(f"{name}\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    assert changed.changed_files("main", tmp_path) == []
    git(tmp_path, "checkout", "-qb", "branch")
    (tmp_path / "renamed").rename(tmp_path / "name ü")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second")
    (tmp_path / "edited").write_text("otherwise\n")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").touch()
    expected = ["edited", "name ü", "new", "removed", "renamed"]
    assert changed.changed_files("main", tmp_path) == expected
    # the base has advanced since
    git(tmp_path, "stash", "-q", "--include-untracked")
    git(tmp_path, "checkout", "-q", "main")
    (tmp_path / "kept").write_text("of the base\n")
    git(tmp_path, "commit", "-qam", "third")
    git(tmp_path, "checkout", "-q", "branch")
    git(tmp_path, "stash", "pop", "-q")
    assert changed.changed_files("main", tmp_path) == expected


def test_missing_base_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    with pytest.raises(SystemExit, match="no-such-branch"):
        changed.changed_files("no-such-branch", tmp_path)


def test_command_prints_the_selection_and_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.changed", "--base", "HEAD", "--list"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert " test files, for " in done.stdout or "nothing differs" in done.stdout or "every test" in done.stdout
