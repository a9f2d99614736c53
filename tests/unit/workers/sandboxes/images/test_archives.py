"""Unpacking source archives."""

from __future__ import annotations

import errno
import io
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from farm.errors import SandboxError
from workers.sandboxes.images.archives import BadArchive, extract, unpack


def tar(path: Path, members: Mapping[str, str], links: Mapping[str, str] | None = None, *, packed: str = "gz") -> Path:
    with tarfile.open(path, f"w:{packed}") as archive:  # type: ignore[call-overload]
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o700
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


@pytest.fixture(autouse=True, params=["this Python", "Python before 3.11.4"])
def _python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the archive filters, as in Debian 12's Python."""
    if request.param != "this Python":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    folder = tmp_path / "layer"
    folder.mkdir()
    return folder


def test_top_folder_is_unpacked_to_the_path(tmp_path: Path, layer: Path) -> None:
    unpack(tar(tmp_path / "p-1.tar.gz", {"p-1/setup.py": "x", "p-1/src/a.py": "y"}), layer, "/workspace/deep")
    assert (layer / "workspace/deep/setup.py").read_text() == "x"
    assert (layer / "workspace/deep/src/a.py").read_text() == "y"
    assert [path.name for path in layer.iterdir()] == ["workspace"]


def test_zip_is_unpacked(tmp_path: Path, layer: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p-1.zip", "w") as packed:
        packed.writestr("p-1/a.py", "x")
    unpack(tmp_path / "p-1.zip", layer, "/workspace")
    assert (layer / "workspace/a.py").read_text() == "x"


@pytest.mark.parametrize(
    ("members", "links"),
    [
        ({"../outside": "x"}, {}),
        ({"p-1/../../outside": "x"}, {}),
        ({"p-1/a": "x"}, {"p-1/link": "/etc/passwd"}),
        ({"p-1/a": "x"}, {"p-1/link": "../../outside"}),
        ({"p-1/a": "x", "p-2/a": "x"}, {}),
        ({"a": "x"}, {}),
    ],
)
def test_dangerous_archives_are_refused(
    tmp_path: Path, layer: Path, members: dict[str, str], links: dict[str, str]
) -> None:
    with pytest.raises(SandboxError):
        unpack(tar(tmp_path / "p-1.tar.gz", members, links), layer, "/workspace")
    assert list(layer.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def zipped(path: Path, *names: str, method: int = zipfile.ZIP_DEFLATED, mode: int = 0o644) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, method
            archive.writestr(info, random.Random(1).randbytes(5000))
    return path


def changed(path: Path, at: int, n: int = 100) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(255 - each for each in data[at : at + n]) + data[at + n :])
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-2000])
    return path


def encrypted(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    return path


LONG = {"a": random.Random(2).randbytes(4000).hex()}
BROKEN_ARCHIVES: dict[str, Callable[[Path], Path]] = {
    "cut gz": lambda at: cut(tar(at / "a", LONG)),
    "cut bz2": lambda at: cut(tar(at / "a", LONG, packed="bz2")),
    "cut xz": lambda at: cut(tar(at / "a", LONG, packed="xz")),
    "cut tar": lambda at: cut(tar(at / "a", LONG, packed="")),
    "changed gz": lambda at: changed(tar(at / "a", LONG), 600),
    "changed zip": lambda at: changed(zipped(at / "a", "a"), 60),
    "changed zip, stored": lambda at: changed(zipped(at / "a", "a", method=zipfile.ZIP_STORED), 60),
    "changed zip, bz2": lambda at: changed(zipped(at / "a", "a", method=zipfile.ZIP_BZIP2), 60),
    "changed zip, lzma": lambda at: changed(zipped(at / "a", "a", method=zipfile.ZIP_LZMA), 60),
    "cut zip": lambda at: cut(zipped(at / "a", "a")),
    "encrypted zip": lambda at: encrypted(zipped(at / "a", "a")),
    "zip with a file as a folder": lambda at: zipped(at / "a", "a", "a/b"),
    "zip with a link as a folder": lambda at: zipped(at / "a", "a", "a/b", mode=0o120777),
    "zip of itself": lambda at: zipped(at / "a", ".."),
    "zip of a long name": lambda at: zipped(at / "a", "a" * 300),
}


@pytest.mark.parametrize("broken", BROKEN_ARCHIVES)
def test_broken_archive_is_reported_in_one_line(tmp_path: Path, layer: Path, broken: str) -> None:
    with pytest.raises(BadArchive) as raised:
        extract(BROKEN_ARCHIVES[broken](tmp_path), layer)
    assert str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["../outside", "/outside", "..\\outside", "a/../../outside"])
def test_zip_is_unpacked_only_into_its_folder(tmp_path: Path, layer: Path, name: str) -> None:
    extract(zipped(tmp_path / "a", name, mode=0o104755), layer)
    (file,) = (each for each in layer.rglob("*") if each.is_file())
    assert stat.S_IMODE(file.stat().st_mode) & 0o7000 == 0
    assert list(tmp_path.rglob("outside*")) in ([], [file])


def test_archive_type_is_detected_from_its_contents(tmp_path: Path, layer: Path) -> None:
    extract(zipped(tmp_path / "a.tgz", "zip"), layer)
    extract(tar(tmp_path / "a.zip", {"tar": "x"}), layer)
    assert {each.name for each in layer.iterdir()} == {"zip", "tar"}


def test_full_disk_is_not_the_archives_fault(tmp_path: Path, layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extract", full)
    with pytest.raises(SandboxError, match="the disk is full") as raised:
        extract(zipped(tmp_path / "a", "a"), layer)
    assert not isinstance(raised.value, BadArchive)


def test_file_that_is_not_an_archive_is_refused(tmp_path: Path, layer: Path) -> None:
    (tmp_path / "p-1.tar.gz").write_text("not an archive")
    with pytest.raises(SandboxError, match=r"p-1\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "p-1.tar.gz", layer, "/workspace")


@pytest.mark.parametrize("path", ["/", "", "/a/../../b"])
def test_invalid_target_paths_are_refused(tmp_path: Path, layer: Path, path: str) -> None:
    with pytest.raises(SandboxError, match="name a folder"):
        unpack(tar(tmp_path / "p-1.tar.gz", {"p-1/a": "x"}), layer, path)
