"""The location of farm.toml, and the line of a setting in it."""

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
    """Return the paths for FARM_CONFIG, the working folder's file and that of FARM_HOME; none of them exists."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("FARM_HOME", str(home))
    monkeypatch.delenv("FARM_CONFIG", raising=False)
    return tmp_path / "named.toml", here / "farm.toml", home / "farm.toml"


def test_first_of_three_locations_is_read(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named, here, home = places
    assert path_in_use() is None
    home.write_text("")
    assert path_in_use() == home
    here.write_text("")
    assert path_in_use() == here
    monkeypatch.setenv("FARM_CONFIG", str(named))
    assert path_in_use() == named, "which must exist, and is an error if missing"
    with pytest.raises(InvalidRequest, match=r"FARM_CONFIG: .*named\.toml cannot be read \(No such file"):
        ConfigFile(named)
    monkeypatch.chdir(named.parent)
    monkeypatch.setenv("FARM_CONFIG", "named.toml")
    assert path_in_use() == named


def test_existing_but_unreadable_file_is_an_error(places: tuple[Path, Path, Path]) -> None:
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


def test_home_of_an_unknown_user_is_refused(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CONFIG", "~no-such-user/farm.toml")
    with pytest.raises(InvalidRequest, match="FARM_CONFIG: there is no such home: ~no-such-user/"):
        path_in_use()


def test_file_that_others_can_change_is_refused(
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
        assert path_in_use() == here, "the file belongs to root"
    else:
        with pytest.raises(InvalidRequest, match="belongs to another user"):
            path_in_use()
    monkeypatch.setenv("FARM_CONFIG", str(here))
    assert path_in_use() == here


def test_removed_working_folder_has_no_file(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_line_of_a_key_is_found(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(text)
    assert ConfigFile(path).location_of("lease_s") == f"{path}:{line}"
    assert ConfigFile(path).location_of("lease") == str(path)


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
def test_nearest_setting_is_suggested(key: str, expected: str) -> None:
    assert f"did you mean {expected}" in nearest(key, NAMES)


def test_unknown_key_without_a_near_setting_refers_to_the_list() -> None:
    assert nearest("qqqq", NAMES) == "`farm config` lists all"


def test_file_of_the_clone_is_used_without_farm_home(
    tmp_path: Path, places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARM_HOME")
    monkeypatch.setattr(config_file, "default_home", lambda: tmp_path / "default")
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "farm.toml").write_text("")
    assert path_in_use() == tmp_path / "default" / "farm.toml"
