"""The summary of restored paths: few entries, and each path is in one of them."""

from __future__ import annotations

import random

import pytest

from workers.sandboxes.isolation.restoring.footprint import summary


def covers(entries: list[str], path: str) -> bool:
    return any(f"/{path}" == each or (each.endswith("/") and f"/{path}/".startswith(each)) for each in entries)


@pytest.mark.parametrize(
    ("paths", "entries"),
    [
        ([], []),
        (["usr/bin/x"], ["/usr/bin/x"]),
        (["etc/a", "etc/b", "usr/lib/x/1", "usr/lib/x/2"], ["/etc/a", "/etc/b", "/usr/lib/x/"]),
        (["a/b", "a/b/c", "a/b/d", "a/b/e"], ["/a/b/"]),
        (["1", "2", "3", "4"], ["/1", "/2", "/3"]),
        (["a/1/x", "b/2/x", "c/3/x", "d/4/x"], ["/a/", "/b/", "/c/"]),
    ],
)
def test_few_paths_are_listed_and_many_are_summarized_by_folder(paths: list[str], entries: list[str]) -> None:
    assert summary(paths, 3) == entries


@pytest.mark.parametrize("seed", range(20))
def test_every_path_is_covered_within_the_limit_of_entries(seed: int) -> None:
    draw = random.Random(seed)
    paths = {"/".join(draw.choice("abcdef") for _ in range(draw.randint(2, 7))) for _ in range(400)}
    entries = summary(sorted(paths), 50)
    assert len(entries) <= 50
    assert all(covers(entries, path) for path in paths)
