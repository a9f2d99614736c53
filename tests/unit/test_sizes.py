"""Hints on size."""

from __future__ import annotations

from pathlib import Path

from tests.sizes import FOLDER_FILES, MODULE_LINES, hints


def test_sizes_above_a_hint_are_listed(tmp_path: Path) -> None:
    for name, n_lines in {"farm/long.py": MODULE_LINES + 1, "workers/short.py": MODULE_LINES}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n" * n_lines)
    full = tmp_path / "tests" / "unit"
    full.mkdir(parents=True)
    for number in range(FOLDER_FILES + 1):
        (full / f"test_{number}.py").write_text("")
    assert hints(tmp_path) == [f"farm/long.py: {MODULE_LINES + 1} lines", f"tests/unit/: {FOLDER_FILES + 1} files"]
