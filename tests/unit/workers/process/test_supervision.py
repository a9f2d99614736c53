"""Notes of workers for their supervisor: each once, none of an earlier worker, and none that is incomplete."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.process.supervision import forget_notes, note_without_sandbox, noted_without_sandbox


def test_notes_are_read_completely(tmp_path: Path) -> None:
    assert noted_without_sandbox(tmp_path) == []
    names = ["empty", 'quo"te', "new\nline", "ü", "a" * 5000]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: note_without_sandbox(tmp_path, name), names * 20))
    assert noted_without_sandbox(tmp_path) == sorted(names)
    (file,) = tmp_path.iterdir()
    with file.open("a") as notes:
        notes.write('"cut o')
    assert noted_without_sandbox(tmp_path) == sorted(names)
    forget_notes(tmp_path)
    assert noted_without_sandbox(tmp_path) == []


def test_unwritable_folder_is_not_an_error(tmp_path: Path) -> None:
    note_without_sandbox(tmp_path / "is not there", "empty")
    forget_notes(tmp_path / "is not there")
    assert noted_without_sandbox(tmp_path / "is not there") == []
