"""Uploads of SWE-ReX's client: a form with a file, or with a zip that becomes a folder."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from farm import task_archive
from farm.api.protocol_parts.multipart import form_fields
from farm.api.swe_rex import rex_errors
from farm.api.swe_rex.rex_errors import RexError
from farm.errors import InvalidRequest
from farm.records.lending.sandbox_calls import MAX_FILE_BYTES
from farm.task_archive import MAX_ARCHIVE_FILES

_CHUNK = 1 << 20
_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("", "0", "f", "false", "n", "no", "off")


@dataclass(frozen=True, slots=True)
class RexUpload:
    """The bytes of a file for a path; if `packed`, a tar for a folder."""

    path: str
    data: bytes
    packed: bool


def read_upload(body: IO[bytes], content_type: str) -> RexUpload:
    """Return the upload in a form. Raises InvalidRequest naming the field, and RexError for a bad zip."""
    with body:
        fields = form_fields(body, content_type)
        file, path = fields.get("file"), fields.get("target_path")
        if file is None:
            raise InvalidRequest("is missing", field="file")
        if path is None or not path.data:
            raise InvalidRequest("is missing", field="target_path")
        unzip = fields["unzip"].data.decode("utf-8", "replace").lower() if "unzip" in fields else ""
        if unzip not in _TRUE + _FALSE:
            raise InvalidRequest("must be true or false", field="unzip")
    try:
        target = path.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"is not UTF-8, at byte {error.start}", field="target_path") from None
    if unzip in _TRUE:
        return RexUpload(target, _folder_of(file.data), packed=True)
    _check_size(len(file.data))
    return RexUpload(target, file.data, packed=False)


def _folder_of(data: bytes) -> bytes:
    """Convert a zip to a tar."""
    with tempfile.TemporaryDirectory(prefix="farm-upload-") as folder:
        top = Path(folder) / "files"
        top.mkdir()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                _extract(archive, top)
            packed = io.BytesIO()
            task_archive.pack(top, packed)
        except RexError:
            raise
        except (OSError, InvalidRequest) as error:
            raise RexError(rex_errors.PLAIN, f"the zip cannot be unpacked: {_without(str(error), folder)}") from None
        except Exception as error:
            # for a broken zip the library raises arbitrary exceptions
            why = str(error) if isinstance(error, zipfile.BadZipFile) else f"{type(error).__name__}: {error}"
            raise RexError(rex_errors.BAD_ZIP, _without(why, folder)) from None
    _check_size(len(packed.getvalue()))
    return packed.getvalue()


def _extract(archive: zipfile.ZipFile, top: Path) -> None:
    """Extract a zip below a folder, whatever its names are."""
    n_bytes = 0
    for n_files, entry in enumerate(archive.infolist(), start=1):
        if n_files > MAX_ARCHIVE_FILES:
            raise RexError(rex_errors.PLAIN, f"the zip has more than {MAX_ARCHIVE_FILES} files")
        path = top.joinpath(*_parts(entry.filename))
        if entry.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, path.open("wb") as file:
            # an entry's declared size may be wrong
            while chunk := source.read(_CHUNK):
                n_bytes += len(chunk)
                _check_size(n_bytes)
                file.write(chunk)
        path.chmod(0o755 if entry.external_attr >> 16 & 0o100 else 0o644)


def _parts(name: str) -> Iterator[str]:
    return (part for part in name.replace("\\", "/").split("/") if part not in ("", ".", ".."))


def _check_size(n_bytes: int) -> None:
    if n_bytes > MAX_FILE_BYTES:
        raise RexError(rex_errors.PLAIN, f"an upload has at most {MAX_FILE_BYTES} bytes: send it in pieces")


def _without(message: str, folder: str) -> str:
    """Return a message without the path of a temporary folder of this process."""
    return message.replace(f"{folder}/files/", "").replace(folder, "")
