"""Task archives: equal bytes for equal files, and no paths that leave the archive."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from farm import task_archive
from farm.errors import InvalidRequest
from farm.task_archive import PartStream, check, pack, unpack


def packed(source: Path) -> tuple[str, bytes]:
    archive = io.BytesIO()
    digest = pack(source, archive)
    return digest, archive.getvalue()


def task(top: Path) -> Path:
    (top / "tests").mkdir(parents=True)
    (top / "tests/test.sh").write_text("exit 0\n")
    (top / "tests/test.sh").chmod(0o700)
    (top / "instruction.md").write_text("be quick\n")
    (top / "tests/link").symlink_to("../instruction.md")
    return top


def tar_of(*members: tuple[str, bytes, str]) -> bytes:
    """Return a tar of (name, type, target), each file with one byte."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, int(kind == tarfile.REGTYPE)
            tar.addfile(info, io.BytesIO(b"x"))
    return data.getvalue()


def test_digest_depends_only_on_the_files(tmp_path: Path) -> None:
    one, two = task(tmp_path / "one"), task(tmp_path / "two")
    os.utime(two / "instruction.md", (1, 1))
    (two / "instruction.md").chmod(0o600)
    digest, data = packed(one)
    assert packed(two) == (digest, data)
    with tarfile.open(tmp_path / "given.tgz", "w:gz") as tar:
        tar.add(two, ".")
    assert packed(tmp_path / "given.tgz") == (digest, data)
    (two / "instruction.md").chmod(0o755)
    assert packed(two)[0] != digest


def test_unpacked_archive_equals_the_packed_folder(tmp_path: Path) -> None:
    _, data = packed(task(tmp_path / "task"))
    stream = PartStream(lambda number: data[number * 700 : (number + 1) * 700] or None)
    unpack(stream.buffered(), tmp_path / "copy")
    check(io.BytesIO(data))
    assert (tmp_path / "copy/tests/link").read_text() == "be quick\n"
    assert (tmp_path / "copy/tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert (stream.n_bytes, stream.digest()) == (len(data), packed(tmp_path / "task")[0])


FOLDER, FILE, LINK = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE
HOSTILE = {
    "absolute": [("/etc/x", FILE, "")],
    "upwards": [("../x", FILE, "")],
    "inner dots": [("a", FOLDER, ""), ("a/../../x", FILE, "")],
    "absolute link": [("l", LINK, "/etc")],
    "link out": [("l", LINK, "../x")],
    "link out by a link": [
        *(("deep", FOLDER, ""), ("deep/er", FOLDER, ""), ("deep/er/s", LINK, "../../top"), ("top", FOLDER, "")),
        ("t", LINK, "deep/er/s/../.."),
    ],
    "through a link": [("l", LINK, "."), ("l/x", FILE, "")],
    "over a link": [("l", LINK, "x"), ("l", FILE, "")],
    "no folder": [("a/b", FILE, "")],
    "hard link": [("a", FILE, ""), ("b", tarfile.LNKTYPE, "a")],
    "device": [("d", tarfile.CHRTYPE, "")],
    "pipe": [("p", tarfile.FIFOTYPE, "")],
}


@pytest.mark.parametrize("read", [check, lambda data: unpack(data, Path("out"))], ids=["checked", "unpacked"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(
    name: str, read: Callable[[io.BytesIO], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    with pytest.raises(InvalidRequest, match="archive"):
        read(io.BytesIO(tar_of(*HOSTILE[name])))
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert list((tmp_path / "a").iterdir()) == [inside]


def test_folders_with_unsupported_entries_are_refused(tmp_path: Path) -> None:
    top = task(tmp_path / "task")
    os.mkfifo(top / "pipe")
    with pytest.raises(InvalidRequest, match="pipe is not a file"):
        packed(top)
    (top / "pipe").unlink()
    (top / "out").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="out is a link to '/etc/passwd'"):
        packed(top)
    with pytest.raises(InvalidRequest, match="neither a folder nor a tar"):
        packed(tmp_path / "none")
    (tmp_path / "no.tar").write_bytes(b"rubbish" * 1000)
    with pytest.raises(InvalidRequest, match="cannot be read as a tar"):
        packed(tmp_path / "no.tar")
    with pytest.raises(InvalidRequest, match="is not a tar"):
        check(io.BytesIO(b"rubbish" * 1000))


def test_exceeded_limits_are_named(tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.size = task_archive.MAX_ARCHIVE_BYTES + 1
    with pytest.raises(InvalidRequest, match="may hold 100000 files and 2000000000 bytes"):
        check(io.BytesIO(member.tobuf()))
