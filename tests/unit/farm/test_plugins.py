"""Plug-ins are found by name, also those that were installed while the process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import NotFound
from farm.plugins import load

GROUP = "farm.tests"


def test_what_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotFound, match=r"no farm\.tests plug-in is called 'later'.*restart a node"):
        load(GROUP, "later")
    (tmp_path / "later_plugin.py").write_text("PLUGIN = 7\n")
    info = tmp_path / "later-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nlater = later_plugin:PLUGIN\n")
    assert load(GROUP, "later") == 7
    with pytest.raises(NotFound, match="installed are: later"):
        load(GROUP, "never")
