"""Modules, programs and libraries of an image that a layer must not replace. Standard library only.

Results that need a walk through the image are computed on first use. `ldconfig` uses the name in a shared library
(SONAME) instead of the file's name.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

LIBRARY = re.compile(r".+\.so(\.[0-9.]+)?$")
STANDARD = re.compile(r"(python|pypy)3?\.?\d*(\.\d+)?t?")
"""Folder of an interpreter's standard library, or of packages shared by several interpreters."""
SITES = ("site-packages", "dist-packages")
_LIBRARY_FOLDERS = ("lib", "lib32", "lib64", "libx32", "usr/lib", "usr/lib32", "usr/lib64", "usr/local/lib", "opt")
_MAX_DEPTH = 6

_HEADER = struct.Struct("<16sHHIQQQIHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_LOAD, _DYNAMIC = 1, 2
_STRINGS, _SONAME = 5, 14
_MAX_SEGMENTS = 64
_MAX_DYNAMIC = 65_536
_MAX_NAME = 256


def distribution(folder: str) -> str:
    """Return the normalized name of the distribution of a `.dist-info` or `.egg-info` folder."""
    return re.sub(r"[-_.]+", "-", re.split(r"-\d|\.(dist|egg)-info", folder)[0]).lower()


def plain(name: str) -> str:
    """Return a program's name without its version: python for python3.11."""
    return name.rstrip("0123456789.") or name


class ImageContents:
    """The layers `lower` of an image, uppermost first, and its folders of programs.

    Raises OSError if a layer cannot be read.
    """

    def __init__(self, lower: Sequence[str], bin_folders: Iterable[str]) -> None:
        for each in lower:
            os.listdir(each)
        self.lower = lower
        self.bin_folders = [folder.strip("/") for folder in bin_folders]

    def node_path(self, path: str) -> str:
        """Return the path on this node of a path of the image; empty if the image does not have it."""
        return next((f"{each}/{path}" for each in self.lower if os.path.lexists(f"{each}/{path}")), "")

    @cached_property
    def programs(self) -> frozenset[str]:
        """Names of programs, with and without version."""
        names = {name for each in self.lower for folder in self.bin_folders for name in _listed(f"{each}/{folder}")}
        return frozenset(names | {plain(name) for name in names})

    @cached_property
    def _walked(self) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
        libraries: set[str] = set()
        sources: set[str] = set()
        standards: set[str] = set()
        sites: set[str] = set()
        for each in self.lower:
            for top in _LIBRARY_FOLDERS:
                for folder, names, files in _walk(os.path.join(each, top)):
                    libraries.update(name for name in files if LIBRARY.fullmatch(name))
                    sources.update(name for name in files if name.endswith((".pm", ".pl", ".rb")))
                    standards.update(f"{folder}/{name}" for name in names if STANDARD.fullmatch(name))
                    sites.update(f"{folder}/{name}" for name in names if name in SITES)
        return frozenset(libraries), frozenset(standards), frozenset(sites), frozenset(sources)

    @property
    def libraries(self) -> frozenset[str]:
        """Names of shared libraries."""
        return self._walked[0]

    @property
    def sources(self) -> frozenset[str]:
        """File names of Perl and Ruby modules."""
        return self._walked[3]

    @cached_property
    def interpreters(self) -> frozenset[str]:
        """Names of standard library folders, such as python3.11."""
        return frozenset(os.path.basename(each) for each in self._walked[1])

    @cached_property
    def standard_modules(self) -> frozenset[str]:
        """Modules of standard libraries, including those that this image lacks."""
        folders = [name for each in self._walked[1] for name in (each, f"{each}/lib-dynload")]
        return frozenset(_stem(name) for folder in folders for name in _listed(folder)) | sys.stdlib_module_names

    @cached_property
    def installed_modules(self) -> frozenset[str]:
        """Names of installed modules and packages."""
        return frozenset(_stem(name) for each in self._walked[2] for name in _listed(each) if "-info" not in name)

    @cached_property
    def distributions(self) -> frozenset[str]:
        """Normalized names of installed distributions."""
        return frozenset(distribution(name) for each in self._walked[2] for name in _listed(each) if "-info" in name)


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _walk(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk folders of libraries, without folders of installed packages."""
    if os.path.islink(top):
        # an absolute link would lead to a folder of the node
        return
    depth = top.count("/") + _MAX_DEPTH
    for folder, names, files in os.walk(top):
        yield folder, list(names), files
        if folder.count("/") >= depth:
            names.clear()
        names[:] = [name for name in names if name not in (*SITES, "node_modules", "__pycache__", "modules")]


def soname(path: str) -> str | None:
    """Return the SONAME of a 64-bit library; empty if it has none or is no library, None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        head = os.pread(descriptor, _HEADER.size, 0)
        if not head.startswith(b"\x7fELF"):
            return ""
        return _soname(descriptor, head)
    except (struct.error, OSError, ValueError, OverflowError, KeyError):
        return None
    finally:
        os.close(descriptor)


def _soname(descriptor: int, head: bytes) -> str | None:
    identity, *_, offset, _, _, _, size, number = _HEADER.unpack(head)
    if identity[4:6] != b"\x02\x01" or size != _SEGMENT.size or number > _MAX_SEGMENTS:
        return None
    table = os.pread(descriptor, size * number, offset)
    segments = [_SEGMENT.unpack_from(table, size * each) for each in range(number)]
    values: dict[int, int] = {}
    for kind, _, start, _, _, length, _, _ in segments:
        if kind == _DYNAMIC:
            data = os.pread(descriptor, min(length, _MAX_DYNAMIC), start)
            for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
                tag, value = _ENTRY.unpack_from(data, at)
                if tag == 0:
                    break
                values.setdefault(tag, value)
    if _SONAME not in values:
        return ""
    for kind, _, start, address, _, length, _, _ in segments:
        if kind == _LOAD and address <= values[_STRINGS] < address + length:
            name_at = start + values[_STRINGS] - address + values[_SONAME]
            return os.pread(descriptor, _MAX_NAME, name_at).partition(b"\0")[0].decode("utf-8", "replace")
    return None
