"""Zips that clients upload: folders without paths that leave them, or an error that the client raises."""

from __future__ import annotations

import io
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

import httpx2
import pytest

from farm.api.swe_rex import rex_verbs
from farm.api.swe_rex.rex_sandbox import BAD_ZIP, PLAIN, RexError
from farm.api.swe_rex.rex_verbs import RexUpload, read_upload


def sent(data: bytes, unzip: str = "true") -> RexUpload:
    """Return the upload parsed from a form as the client sends it."""
    fields = {"target_path": "/t", "unzip": unzip}
    request = httpx2.Request("POST", "http://h/", data=fields, files={"file": ("f", io.BytesIO(data))})
    body: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - its reader closes it
    body.write(request.read())
    return read_upload(body, request.headers["content-type"])


def zipped(files: Mapping[str, bytes], mode: int = 0) -> bytes:
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return result.getvalue()


def names(upload: RexUpload) -> dict[str, bytes | None]:
    with tarfile.open(fileobj=io.BytesIO(upload.data)) as archive:
        members = [(member, archive.extractfile(member)) for member in archive]
        return {member.name: None if file is None else file.read() for member, file in members}


def test_zip_becomes_a_folder() -> None:
    upload = sent(zipped({"a": b"1", "d/": b"", "d/é": b"\0\xff", "empty/": b""}, 0o755))
    assert (upload.path, upload.packed) == ("/t", True)
    assert names(upload) == {"a": b"1", "d": None, "d/é": b"\0\xff", "empty": None}
    with tarfile.open(fileobj=io.BytesIO(upload.data)) as archive:
        assert archive.getmember("a").mode == 0o755


def test_no_path_leaves_the_folder() -> None:
    upload = sent(zipped({"../../up": b"1", "/etc/x": b"2", "a/../b": b"3", "..\\w": b"4"}))
    assert names(upload) == {"up": b"1", "etc": None, "etc/x": b"2", "a": None, "a/b": b"3", "w": b"4"}
    # a link becomes a file that contains the link's target
    assert names(sent(zipped({"l": b"/etc"}, 0o120777))) == {"l": b"/etc"}


def test_file_is_taken_as_it_is() -> None:
    assert sent(b"\0PK", "false") == RexUpload("/t", b"\0PK", packed=False)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", BAD_ZIP),
        (b"PK\x03\x04", BAD_ZIP),
        (zipped({"a": b"x" * 1000})[:-30], BAD_ZIP),
        (zipped({"a": bytes(range(256)) * 8}).replace(b"\x10", b"\x11"), BAD_ZIP),
        (zipped({"a": b"1", "a/b": b"2"}), PLAIN),
        (zipped({"x" * 300: b"1"}), PLAIN),
        (zipped({"": b"1"}), BAD_ZIP),
    ],
    ids=range(7),
)
def test_invalid_zip_is_an_error_of_the_client(data: bytes, kind: str) -> None:
    with pytest.raises(RexError) as refused:
        sent(data)
    assert refused.value.class_path == kind
    assert tempfile.gettempdir() not in str(refused.value)


def test_random_bytes_raise_only_rex_errors() -> None:
    seeded, whole = random.Random(1), zipped({"a": b"x" * 100, "d/b": bytes(range(256))})
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(seeded.randrange(1, 4)):
            data[seeded.randrange(len(data))] = seeded.randrange(256)
        with suppress(RexError):
            sent(bytes(data))


def test_zip_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rex_verbs, "MAX_FILE_BYTES", 100_000)
    with pytest.raises(RexError, match="at most 100000 bytes"):
        sent(zipped({"a": bytes(1_000_000)}))
    with pytest.raises(RexError, match="at most 100000 bytes"):
        sent(bytes(100_001), "false")
