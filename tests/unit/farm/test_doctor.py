"""What `farm doctor` says of the control group that the farm was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.doctor import _cgroup
from farm.settings import Settings


def test_none_is_needed() -> None:
    found = _cgroup(Settings(cgroup=None))
    assert found.ok
    assert "FARM_CGROUP" in found.detail


@pytest.mark.parametrize(
    ("file", "text", "ok", "detail"),
    [
        ("cgroup.controllers", "cpu memory pids\n", True, "version 2"),
        ("cgroup.controllers", "cpu pids\n", False, "no memory controller"),
        ("memory.limit_in_bytes", "1\n", True, "version 1"),
        ("readme", "", False, "is no control group"),
    ],
)
def test_one_must_have_the_memory_controller(tmp_path: Path, file: str, text: str, ok: bool, detail: str) -> None:
    (tmp_path / file).write_text(text)
    found = _cgroup(Settings(cgroup=tmp_path))
    assert found.ok is ok
    assert detail in found.detail
    assert "FARM_CGROUP" in found.mend
