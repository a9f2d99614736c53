"""FARM_HOME and the key in it: accessible only to their owner, whatever existed before."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farm.errors import NotAllowed
from farm.home import KEY_FILE, known_key, own_file, own_home, own_key, write_own
from farm.settings import Settings


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755, 0o777, 0o711, 0o700])
def test_home_is_closed_to_others(tmp_path: Path, before: int | None) -> None:
    home = tmp_path / "a" / "home"
    if before is not None:
        home.mkdir(parents=True)
        home.chmod(before)
    own_home(home)
    assert mode(home) == 0o700


def test_home_of_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "home"
    if os.getuid() == 0:
        other.mkdir()
        os.chown(other, 65534, 65534)
    else:
        other = Path("/usr")
    with pytest.raises(NotAllowed, match="belongs to another user: set FARM_HOME"):
        own_home(other)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_closed_to_others_with_any_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "old").write_text("x")
    (tmp_path / "old").chmod(0o666)
    before = os.umask(umask)
    try:
        own_file(tmp_path / "old")
        own_file(tmp_path / "new")
        write_own(tmp_path / "text", "whole")
        write_own(tmp_path / "text", "again")
    finally:
        os.umask(before)
    assert {mode(path) for path in tmp_path.iterdir()} == {0o600}
    assert (tmp_path / "old").read_text() == "x", "its contents are kept"
    assert (tmp_path / "text").read_text() == "again"


def test_key_is_created_once_by_the_first_process(tmp_path: Path) -> None:
    home = Settings(home=tmp_path / "home", api_key="")
    assert known_key(home) == ""
    begun = threading.Barrier(16)

    def ask() -> str:
        begun.wait(600)
        return own_key(home)

    with ThreadPoolExecutor(16) as pool:
        keys = {each.result() for each in [pool.submit(ask) for _ in range(16)]}
    assert len(keys) == 1
    assert keys == {known_key(home)}
    assert len(keys.pop()) == 48
    assert [path.name for path in (tmp_path / "home").iterdir()] == [KEY_FILE]
    assert mode(tmp_path / "home" / KEY_FILE) == 0o600


def test_key_of_the_environment_overrides_the_file(tmp_path: Path) -> None:
    own_key(Settings(home=tmp_path, api_key=""))
    assert known_key(Settings(home=tmp_path, api_key=" given\n")) == "given"
    assert own_key(Settings(home=tmp_path, api_key="given")) == "given"
