from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farm.tasks.harbor_config import ArtefactEntry, CollectHook
from workers.handlers.harbor.artefact_files import (
    ArtefactsTooLarge,
    entries,
    excluded,
    put_artefacts,
    run_hooks,
    taken,
)
from workers.testing import FakeSandbox


@pytest.mark.parametrize(
    ("path", "pattern", "left_out"),
    [
        ("x.tmp", "*.tmp", True),
        ("a/x.tmp", "*.tmp", True),
        ("a/b/c", "b/c", True),
        ("a/b", "b/", True),
        ("a/bc", "b", False),
        ("a/b/c", "a/*", True),
    ],
)
def test_patterns_match_like_those_of_tar(path: str, pattern: str, left_out: bool) -> None:
    assert excluded(Path("/top") / path, Path("/top"), [pattern]) is left_out


def test_conventional_folder_is_collected_unless_it_is_named() -> None:
    named = ArtefactEntry(source="/logs/artifacts/", exclude=("x",))
    assert [each.source for each in entries([ArtefactEntry(source="/a")], [])] == ["/logs/artifacts", "/a"]
    assert entries([named], []) == [named]


def test_files_are_collected_as_bytes_and_restored_to_the_same_paths() -> None:
    asyncio.run(_files_come_out_as_bytes_and_go_to_the_same_paths())


async def _files_come_out_as_bytes_and_go_to_the_same_paths() -> None:
    first = FakeSandbox("first")
    await first.write_file("/app/out/a.bin", b"\xff\x00")
    await first.write_file("/app/out/deep/b.tmp", b"x")
    await first.write_file("/app/one", b"1")
    wanted = [ArtefactEntry(source=path, exclude=("*.tmp",)) for path in ("/app/out", "/app/one", "/not/there")]
    tree = await taken(first, wanted)
    assert {path: file.data for path, file in tree.items() if file.kind == "file"} == {
        "/app/out/a.bin": b"\xff\x00",
        "/app/one": b"1",
    }
    second = FakeSandbox("second")
    await put_artefacts(second, tree)
    assert second.files == {"/app/out/a.bin": b"\xff\x00", "/app/one": b"1"}


def test_files_beyond_the_limit_are_reported() -> None:
    asyncio.run(_too_large_artefacts_are_refused())


async def _too_large_artefacts_are_refused() -> None:
    sandbox = FakeSandbox("large")
    await sandbox.write_file("/app/big", b"x" * 17_000_000)
    with pytest.raises(ArtefactsTooLarge, match="/app/big"):
        await taken(sandbox, [ArtefactEntry(source="/app/big")])


def test_hooks_run_in_order() -> None:
    asyncio.run(_hooks_run_in_order())


async def _hooks_run_in_order() -> None:
    sandbox = FakeSandbox("hooks")
    await run_hooks(sandbox, [CollectHook(command="one"), CollectHook(command="two")])
    assert [argv[-1] for argv in sandbox.ran] == ["one", "two"]
