"""The default home of a farm, and the values that a process chooses itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farm.errors import InvalidRequest
from farm.settings import Settings, choose, default_home, settings


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


def test_chosen_values_replace_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_NODE", "first")
    assert choose(build_network=True).node == "first"
    chosen = choose(node="second", room=7, build_env={"A": "b"})
    assert chosen is settings()
    assert (chosen.node, chosen.room, chosen.build_network) == ("second", 7, True)
    variables = chosen.chosen_variables
    assert variables == {
        "FARM_NODE": "second",
        "FARM_ROOM": "7",
        "FARM_BUILD_NETWORK": "True",
        "FARM_BUILD_ENV": '{"A": "b"}',
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    read = settings()
    assert (read.node, read.room, read.build_network, read.build_env) == ("second", 7, True, {"A": "b"})
    assert not settings().choices


def test_refused_choice_changes_nothing() -> None:
    with pytest.raises(InvalidRequest, match="room"):
        choose(room=-1)
    assert settings().room == 0
