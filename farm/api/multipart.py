"""Forms with files, `multipart/form-data`: spooled to disk while they are read, and parsed there."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from typing import IO

from farm.api.schemas import ApiRequest, RequestRejected
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.errors import InvalidRequest

_MAX_HEAD = 8192
_MAX_FIELDS = 100


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form: its bytes, and the file name, "" for a value."""

    data: bytes
    file_name: str = ""


async def spooled(request: ApiRequest) -> IO[bytes]:
    """Return the body of a request as an anonymous file. Raises RequestRejected for one that is too large."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - its reader closes it
    try:
        await _fill(file, request.pieces())
    except BaseException:
        file.close()
        raise
    return file


async def _fill(file: IO[bytes], pieces: AsyncIterator[bytes]) -> None:
    n_bytes = 0
    async for piece in pieces:
        n_bytes += len(piece)
        if n_bytes > serialization.MAX_BODY_BYTES:
            raise RequestRejected(ProblemDetails(413, "InvalidRequest", serialization.TOO_LARGE, "body"))
        file.write(piece)
    file.seek(0)


def form_fields(body: IO[bytes], content_type: str) -> Mapping[str, FormField]:
    """Return the fields of a form by name, of repeated names the first. Raises InvalidRequest for a malformed form."""
    return dict(reversed(form_parts(body, content_type)))


def form_parts(body: IO[bytes], content_type: str) -> Sequence[tuple[str, FormField]]:
    """Return the fields of a form with their names, in order. Raises InvalidRequest for a malformed form."""
    head = _headers(f"content-type: {content_type}".encode())
    boundary = _parameter(head, "content-type", "boundary")
    if head.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise InvalidRequest("must be multipart/form-data, with its boundary", field="body")
    size = body.seek(0, 2)
    if not size:
        raise InvalidRequest("is empty", field="body")
    result: list[tuple[str, FormField]] = []
    with mmap.mmap(body.fileno(), size, access=mmap.ACCESS_READ) as data:
        for start, end in _parts(data, b"--" + boundary.encode()):
            cut = data.find(b"\r\n\r\n", start, min(end, start + _MAX_HEAD))
            if cut < 0:
                raise InvalidRequest("has a part without headers", field="body")
            head = _headers(data[start:cut])
            name = head.get_param("name", header="content-disposition")
            if isinstance(name, str):
                file_name = _parameter(head, "content-disposition", "filename")
                result.append((name, FormField(data[cut + 4 : end], file_name)))
    return result


def _parts(data: mmap.mmap, delimiter: bytes) -> list[tuple[int, int]]:
    """Return the begin and end of each part of a form, its headers included."""
    result: list[tuple[int, int]] = []
    # there may be a preamble before the first boundary
    place = 0 if data[: len(delimiter)] == delimiter else data.find(b"\r\n" + delimiter) + 2
    while data[place : place + len(delimiter)] == delimiter:
        start = place + len(delimiter)
        if data[start : start + 2] == b"--":
            return result
        end = data.find(b"\r\n" + delimiter, start)
        if data[start : start + 2] != b"\r\n" or end < 0:
            break
        if len(result) == _MAX_FIELDS:
            raise InvalidRequest(f"has more than {_MAX_FIELDS} fields", field="body")
        result.append((start + 2, end))
        place = end + 2
    raise InvalidRequest("is an incomplete form: a boundary is missing", field="body")


def _parameter(head: Message, header: str, name: str) -> str:
    """Return a parameter of a header, "" if it has none. Raises InvalidRequest for an unknown encoding."""
    try:
        return collapse_rfc2231_value(head.get_param(name, "", header=header)).rstrip()
    except ValueError as error:
        raise InvalidRequest(f"has an unreadable {name}: {error}", field="body") from None


def _headers(data: bytes) -> Message:
    return HeaderParser().parsestr(data.decode("utf-8", "replace"))
