"""The place of farm.toml, and the line of it that a setting stands on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farm.configuration import config_file
from farm.configuration.config_file import ConfigFile, nearest, path_in_use
from farm.errors import InvalidRequest

NAMES = ("lease_s", "store_url", "run_slots", "warm_pool", "warm_pool_total", "home")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Return what FARM_CONFIG may name, the working folder's file and that of FARM_HOME; none of them is there."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("FARM_HOME", str(home))
    monkeypatch.delenv("FARM_CONFIG", raising=False)
    return tmp_path / "named.toml", here / "farm.toml", home / "farm.toml"


def test_the_first_of_three_places_is_read(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named, here, home = places
    assert path_in_use() is None
    home.write_text("")
    assert path_in_use() == home
    here.write_text("")
    assert path_in_use() == here
    monkeypatch.setenv("FARM_CONFIG", str(named))
    assert path_in_use() == named, "which must be there, and whose absence is an error"
    with pytest.raises(InvalidRequest, match=r"FARM_CONFIG: .*named\.toml cannot be read \(No such file"):
        ConfigFile(named)
    monkeypatch.chdir(named.parent)
    monkeypatch.setenv("FARM_CONFIG", "named.toml")
    assert path_in_use() == named


def test_a_file_that_is_there_and_cannot_be_read_is_an_error(places: tuple[Path, Path, Path]) -> None:
    _, here, home = places
    home.symlink_to("nowhere")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        path_in_use()
    home.unlink()
    here.mkdir()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        ConfigFile(here)
    nested, long = b"a = " + b"[" * 20_000, b"a = " + b"1" * 5_000
    for content in (b"a = [", b"\xff\xfe", b"a = 1\na = 2", b"a = 1\n\0", nested, long):
        home.write_bytes(content)
        with pytest.raises(InvalidRequest, match=r"home/farm\.toml is no"):
            ConfigFile(home)
    for endless in (Path("/dev/zero"), home):
        home.write_bytes(b"#" * 1_000_001)
        with pytest.raises(InvalidRequest, match="has more than 1_000_000 bytes"):
            ConfigFile(endless)


def test_a_home_that_nobody_has_is_no_path(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CONFIG", "~no-such-user/farm.toml")
    with pytest.raises(InvalidRequest, match="FARM_CONFIG: there is no such home: ~no-such-user/"):
        path_in_use()


def test_a_file_that_others_can_change_is_named_or_not_read(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, here, _ = places
    here.write_text("")
    here.chmod(0o666)
    with pytest.raises(InvalidRequest, match=f"can be changed by other users: .*FARM_CONFIG={here}"):
        path_in_use()
    here.chmod(0o644)
    monkeypatch.setattr(os, "getuid", lambda: 4711 if here.stat().st_uid != 4711 else 4712)
    if here.stat().st_uid == 0:
        assert path_in_use() == here, "root's"
    else:
        with pytest.raises(InvalidRequest, match="belongs to another user"):
            path_in_use()
    monkeypatch.setenv("FARM_CONFIG", str(here))
    assert path_in_use() == here


def test_a_working_folder_that_is_removed_has_no_file(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    places[1].parent.rmdir()
    assert path_in_use() is None
    places[2].write_text("")
    assert path_in_use() == places[2]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lease_s = 5", 1),
        ("# lease_s = 4\n\n  lease_s=5", 3),
        ('"lease_s" = 5', 1),
        ('a = """\nlease_s = 4\n"""\nlease_s = 5', 4),
        ("a = [\n 1,\n]\nlease_s.x = 5", 4),
        ("[other]\nlease_s = 4\n[ lease_s ]\nx = 1", 3),
        ("[lease_s.x]\ny = 1", 1),
        ("other = { lease_s = 3 }\n'lease_s' = 5", 2),
    ],
)
def test_the_line_of_a_key(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(text)
    assert ConfigFile(path).place_of("lease_s") == f"{path}:{line}"
    assert ConfigFile(path).place_of("lease") == str(path)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lease", "lease_s"),
        ("FARM_LEASE_S", "lease_s"),
        ("lease-s", "lease_s"),
        ("storeurl", "store_url"),
        ("StoreUrl", "store_url"),
        ("run_slot", "run_slots"),
        ("warm_pool", "warm_pool"),
    ],
)
def test_the_nearest_setting(key: str, expected: str) -> None:
    assert f"did you mean {expected}" in nearest(key, NAMES)


def test_what_is_near_to_none() -> None:
    assert nearest("qqqq", NAMES) == "`farm config` lists all"


def test_the_file_of_the_clone_comes_without_farm_home(
    tmp_path: Path, places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARM_HOME")
    monkeypatch.setattr(config_file, "default_home", lambda: tmp_path / "default")
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "farm.toml").write_text("")
    assert path_in_use() == tmp_path / "default" / "farm.toml"
