"""The binaries of the farm's own Postgres, if the user that it runs as cannot read them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from farm.launch import head
from farm.launch.head import binaries_for


def test_partial_copy_of_the_binaries_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries, folder = tmp_path / "site" / "pgserver" / "pginstall" / "bin", tmp_path / "own"
    libraries = tmp_path / "site" / "pgserver.libs"
    for made in (binaries, libraries, folder):
        made.mkdir(parents=True)
    for file in (binaries / "initdb", binaries / "postgres", libraries / "libpq.so"):
        file.write_text(file.name)
    monkeypatch.setattr(head, "_runs", lambda binary, user: False)
    assert binaries_for(None, binaries, folder) == binaries, "the current user's need no copy"

    whole = shutil.copytree

    def cut(source: Path, target: Path, *more: Any, **options: Any) -> None:
        whole(source, target, *more, **options)
        if source == binaries.parent:
            (target / "bin" / "postgres").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", cut)
        with pytest.raises(KeyboardInterrupt):
            binaries_for("daemon", binaries, folder)
    for _ in range(2):
        copied = binaries_for("daemon", binaries, folder)
        assert {each.name for each in copied.iterdir()} == {"initdb", "postgres"}
        # next to their package, where the wheel's binaries look for them
        assert (copied / ".." / ".." / ".." / "pgserver.libs" / "libpq.so").read_text() == "libpq.so"
