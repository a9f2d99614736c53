"""Copies out of a sandbox, by the code that runs in it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from workers.sandboxes.isolation import sandbox_files


def copied(path: Path, folder: Path) -> list[str]:
    """Return the sorted names in the archive of a download."""
    archive = folder / "archive.tar"
    sandbox_files.download(str(path), os.open(archive, os.O_WRONLY | os.O_CREAT), 1_000_000)
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as packed:
        return sorted(packed.getnames())


def test_folder_with_too_many_files_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_files, "MAX_FILES", 4)
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / name).write_text(name)
    # the folder counts as one, too
    assert len(copied(source, tmp_path)) == 4
    (source / "d").write_text("d")
    (tmp_path / "archive.tar").unlink()
    with pytest.raises(sandbox_files.FileRefused, match="More than 4 files"):
        copied(source, tmp_path)
    assert (tmp_path / "archive.tar").read_bytes() == b""
