"""Multipart forms are parsed as they were built, whatever bytes they hold; malformed ones are refused."""

from __future__ import annotations

import io
import os
import random
import tempfile
from typing import IO

import httpx2
import pytest

from farm.api.protocols import FormField, form_fields
from farm.errors import InvalidRequest

TYPE = "multipart/form-data; boundary=b"


def on_disk(data: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - its user closes it
    file.write(data)
    return file


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\r\n",
        b"\r\n\r\n",
        b"--b",
        b"\r\n--c\r\n",
        b"\0\xff" * 100,
        os.urandom(100_000),
        b"a\r\n-",
        b"\r\n" * 9,
    ],
    ids=range(10),
)
def test_form_is_parsed_as_it_was_built(data: bytes) -> None:
    files = {"file": ("a name.bin", io.BytesIO(data), "application/zip")}
    request = httpx2.Request("POST", "http://h/", data={"path": "/é", "flag": "true"}, files=files)
    with on_disk(request.read()) as body:
        fields = form_fields(body, request.headers["content-type"])
    assert fields == {
        "path": FormField("/é".encode()),
        "flag": FormField(b"true"),
        "file": FormField(data, "a name.bin"),
    }


def test_text_around_a_form_and_a_quoted_boundary_are_allowed() -> None:
    data = b'words\r\n--a b\r\ncontent-disposition: form-data; name="x"\r\n\r\n1\r\n--a b--\r\nmore words'
    with on_disk(data) as body:
        assert form_fields(body, 'multipart/form-data; boundary="a b"') == {"x": FormField(b"1")}


@pytest.mark.parametrize(
    ("data", "content_type", "complaint"),
    [
        (b"", TYPE, "empty"),
        (b"x", "text/plain", "multipart/form-data"),
        (b"x", "", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=\xff", "multipart/form-data"),
        (b"--b\r\n\r\nx\r\n--b--", TYPE, "without headers"),
        (b"--b\r\nx: " + b"y" * 9000 + b"\r\n\r\nx\r\n--b--", TYPE, "without headers"),
        (b"--b\r\nx: y\r\n\r\nx\r\n--b\r\n", TYPE, "a boundary is missing"),
        (b"--b\r\nx: y\r\n\r\nx", TYPE, "a boundary is missing"),
        ((b"--b\r\nx: y\r\n\r\nx\r\n" * 101) + b"--b--", TYPE, "more than 100"),
    ],
    ids=range(9),
)
def test_malformed_form_is_refused(data: bytes, content_type: object, complaint: str) -> None:
    header = content_type.decode("latin-1") if isinstance(content_type, bytes) else str(content_type)
    with on_disk(data) as body, pytest.raises(InvalidRequest, match=complaint):
        form_fields(body, header)


def test_random_bytes_raise_only_invalid_request() -> None:
    seeded = random.Random(1)
    pieces = [
        b"--b",
        b"--b--",
        b"\r\n",
        b"\r\n\r\n",
        b"content-disposition: form-data; name=x",
        b"\0",
        b"\xff",
        b":",
        b"=",
    ]
    for _ in range(300):
        data = b"".join(seeded.choices(pieces, k=seeded.randrange(1, 12)))
        with on_disk(data) as body:
            try:
                form_fields(body, TYPE)
            except InvalidRequest:
                continue


@pytest.mark.parametrize("name", ["undefined''a", "x\0y''%ff"])
def test_file_name_in_an_unknown_encoding_is_refused(name: str) -> None:
    part = f'--x\r\nContent-Disposition: form-data; name="file"; filename*={name}\r\n\r\nd\r\n--x--\r\n'
    with tempfile.TemporaryFile() as body:
        body.write(part.encode())
        with pytest.raises(InvalidRequest, match="filename"):
            form_fields(body, "multipart/form-data; boundary=x")
