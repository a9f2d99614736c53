"""The default home of a farm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farm.settings import Settings, default_home


def test_environment_made_in_a_clone_uses_the_farm_of_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "clone" / ".venv"
    environment.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.delenv("FARM_HOME", raising=False)
    assert default_home() == tmp_path / "me" / ".farm", "an environment that was not made by make"
    (environment / "place").write_text("/elsewhere\n")
    assert default_home() == tmp_path / "me" / ".farm", "an environment copied from another clone"
    (environment / "place").write_text(f"{tmp_path / 'clone'}\n")
    assert default_home() == tmp_path / "clone" / ".farm"
    assert Settings().home == tmp_path / "clone" / ".farm"
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "mine"))
    assert Settings().home == tmp_path / "mine"
