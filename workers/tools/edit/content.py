r"""A file's contents as bytes and as text: line ends, and positions of lines and texts.

If all lines end in \r\n, the model reads and writes \n, and the file keeps \r\n.
"""

from __future__ import annotations

from farm.errors import ToolError

MAX_FILE_BYTES = 5_000_000
"""Maximum size of a file: a larger one would block the worker's event loop for a tenth of a second or more."""
MAX_LINE_NUMBERS = 20


def as_read(path: str, data: bytes) -> str:
    """Return the text that the model reads. Raises ToolError if the data is not text, or too large."""
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(
            f"{path} has {len(data)} bytes, more than the {MAX_FILE_BYTES} that this tool handles; look at a part of "
            "it with another one."
        )
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file, not a text file; use another tool for it.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ToolError(
            f"{path} is not a text file in UTF-8: it has the byte {data[error.start]:#04x} in line {line}. Convert it "
            "first, or use another tool for it."
        ) from None
    return text.replace("\r\n", "\n") if line_end(data) == b"\r\n" else text


def as_kept(text: str, end: bytes) -> bytes:
    """Return the model's text as bytes, with the line ends of the file."""
    data = text.encode()
    return data.replace(b"\r\n", b"\n").replace(b"\n", end) if end == b"\r\n" else data


def line_end(data: bytes) -> bytes:
    n_ends = data.count(b"\n")
    return b"\r\n" if n_ends and data.count(b"\r\n") == n_ends else b"\n"


def line_at(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def end_of_line(data: bytes, line: int) -> int:
    """Return the offset of the line after this one; the end of the file if there is none."""
    return len(data) - len(data.split(b"\n", line)[line]) if line <= data.count(b"\n") else len(data)


def lines_of(data: bytes, part: bytes) -> str:
    """Return the numbers of the lines that contain `part`, as a list; of many only the first."""
    numbers: list[int] = []
    at, counted, line = data.find(part), 0, 1
    while at >= 0 and len(numbers) < MAX_LINE_NUMBERS:
        line += data.count(b"\n", counted, at)
        counted = at
        numbers.append(line)
        at = data.find(part, at + 1)
    return f"{numbers} and more" if at >= 0 else str(numbers)
