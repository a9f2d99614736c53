"""Unpacking source archives."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from farm.errors import SandboxError
from workers.sandboxes.images.archives import unpack


def tar(path: Path, members: dict[str, str], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


@pytest.fixture(autouse=True, params=["this Python", "Python before 3.11.4"])
def _python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python has no filters for archives."""
    if request.param != "this Python":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    folder = tmp_path / "layer"
    folder.mkdir()
    return folder


def test_the_top_folder_lies_at_the_path(tmp_path: Path, layer: Path) -> None:
    unpack(tar(tmp_path / "p-1.tar.gz", {"p-1/setup.py": "x", "p-1/src/a.py": "y"}), layer, "/workspace/deep")
    assert (layer / "workspace/deep/setup.py").read_text() == "x"
    assert (layer / "workspace/deep/src/a.py").read_text() == "y"
    assert [path.name for path in layer.iterdir()] == ["workspace"]


def test_zip(tmp_path: Path, layer: Path) -> None:
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
def test_what_is_refused(tmp_path: Path, layer: Path, members: dict[str, str], links: dict[str, str]) -> None:
    with pytest.raises(SandboxError):
        unpack(tar(tmp_path / "p-1.tar.gz", members, links), layer, "/workspace")
    assert list(layer.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_no_archive_at_all(tmp_path: Path, layer: Path) -> None:
    (tmp_path / "p-1.tar.gz").write_text("not an archive")
    with pytest.raises(SandboxError, match=r"p-1\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "p-1.tar.gz", layer, "/workspace")


@pytest.mark.parametrize("path", ["/", "", "/a/../../b"])
def test_paths_that_are_no_place(tmp_path: Path, layer: Path, path: str) -> None:
    with pytest.raises(SandboxError, match="name a folder"):
        unpack(tar(tmp_path / "p-1.tar.gz", {"p-1/a": "x"}), layer, path)
