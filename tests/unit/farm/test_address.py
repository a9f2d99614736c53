"""The address of a farm in a folder: a client gets it or one error, whatever the folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.client.connect import connect
from farm.errors import FarmUnreachable, InvalidRequest
from farm.home import address_of
from farm.launch.shared_address import SharedAddress, write_address
from farm.settings import Settings, settings

API = "http://127.0.0.1:1"


def test_address_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text(json.dumps({"store_url": "sqlite:////f.db", "broker_url": "redis://h"}))
    assert address_of(tmp_path, Settings()) == ("sqlite:////f.db", "redis://h")
    assert address_of(None, Settings(home=tmp_path)) == ("sqlite:////f.db", "redis://h")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"3", b"{}", b'{"store_url": "sqlite://"}', b"\xff\xfe\0", b"[" * 100_000]
)
def test_garbage_is_not_an_address(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "address.json").write_bytes(content)
    with pytest.raises(FarmUnreachable, match=r"address\.json does not hold a farm's address"):
        address_of(tmp_path, Settings())


def test_head_that_is_still_starting_is_reported(tmp_path: Path) -> None:
    write_address(tmp_path, SharedAddress("ab12", password="p"))
    with pytest.raises(FarmUnreachable, match=f"the head of {tmp_path} is not ready"):
        address_of(tmp_path, Settings())


def test_api_address_is_refused_where_a_database_is_needed(tmp_path: Path) -> None:
    for url, defaults in ((API, Settings()), (None, Settings(home=tmp_path, store_url=API))):
        with pytest.raises(InvalidRequest, match="this needs the farm's database URL or its folder"):
            address_of(url, defaults)


def test_client_finds_an_api_in_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARM_STORE_URL", API)
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    settings.cache_clear()
    try:
        with pytest.raises(FarmUnreachable, match="no API of a farm answers"):
            connect(first_s=0.1)
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_folder_without_a_farm_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FarmUnreachable, match="no farm was ever started in"):
            address_of(folder, Settings())
