"""Build contexts: globs, `.dockerignore`, links, and digests over names, modes and contents but not times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.dockerfile.context import BuildContext, copy_files, digest_of

FILES = ("a.txt", "b.txt", "deep/a.txt", "deep/down/c.py", "deep/down/c.pyc", "node_modules/x", "src/keep", "src/drop")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def left(folder: Path, ignore: str) -> set[str]:
    (folder / ".dockerignore").write_text(ignore)
    context = BuildContext.of(folder, folder / "Dockerfile")
    return {file.relative for file in context.tree("") if file.path.is_file()} - {".dockerignore"}


IGNORED = {
    "*.txt": {"a.txt", "b.txt"},
    "**/*.txt": {"a.txt", "b.txt", "deep/a.txt"},
    "deep/": {"deep/a.txt", "deep/down/c.py", "deep/down/c.pyc"},
    "/node_modules\n# comment\n": {"node_modules/x"},
    "src\n!src/keep": {"src/drop"},
    "*\n!deep/down/*.py": {*FILES} - {"deep/down/c.py"},
    "**/down/c.py?": {"deep/down/c.pyc"},
    "[ab].txt": {"a.txt", "b.txt"},
}


@pytest.mark.parametrize("ignore", IGNORED)
def test_ignored_files_are_excluded(folder: Path, ignore: str) -> None:
    assert left(folder, ignore) == {*FILES} - IGNORED[ignore]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("./deep/*/*.py", ["deep/down/c.py"]),
        ("/deep", ["deep"]),
        (".", [""]),
        ("none*", []),
        ("../..", [""]),
        ("d[a-e]ep/a.txt", ["deep/a.txt"]),
    ],
)
def test_sources_are_matched(folder: Path, source: str, expected: list[str]) -> None:
    assert BuildContext(folder).named(source) == expected


def test_ignore_file_of_the_dockerfile_takes_precedence(folder: Path) -> None:
    (folder / ".dockerignore").write_text("a.txt")
    (folder / "Other.dockerignore").write_text("b.txt")
    context = BuildContext.of(folder, folder / "Other")
    assert context.named("*.txt") == ["a.txt"]


def test_digest_covers_modes_and_contents_but_not_times(folder: Path, tmp_path: Path) -> None:
    config = sandbox_config()
    context = BuildContext(folder)
    before = digest_of(context.tree("deep"), config.digests_folder)
    os.utime(folder / "deep/a.txt", (1, 1))
    assert digest_of(context.tree("deep"), config.digests_folder) == before
    (folder / "deep/a.txt").chmod(0o755)
    changed = digest_of(context.tree("deep"), config.digests_folder)
    (folder / "deep/a.txt").write_text("other")
    assert len({before, changed, digest_of(context.tree("deep"), config.digests_folder)}) == 3


def test_links_are_kept_and_none_leaves_the_context(folder: Path, tmp_path: Path) -> None:
    (folder / "deep/link").symlink_to("/etc/passwd")
    (folder / "out").symlink_to("/etc")
    (folder / "deep").chmod(0o555)
    target = tmp_path / "copy"
    copy_files(BuildContext(folder).tree("deep"), target)
    assert (target / "link").readlink() == Path("/etc/passwd")
    assert (target.stat().st_mode & 0o777, (target / "down/c.py").read_text()) == (0o555, "deep/down/c.py")
    (folder / "deep").chmod(0o755)
    with pytest.raises(ValueError, match="leads out of the context"):
        BuildContext(folder).tree("out")
