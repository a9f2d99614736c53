# ruff: noqa: PTH114, PTH118, PTH119, PTH208
"""The contents of an image that a layer must not replace: modules, programs, libraries; standard library only.

What takes a walk through the image is looked up when it is first needed.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cached_property

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LIBRARY = re.compile(r".+\.so(\.[0-9.]+)?$")
STANDARD = re.compile(r"(python|pypy)3?\.?\d*(\.\d+)?t?")
"""The folder of an interpreter's standard library, or of packages for several of them."""
SITES = ("site-packages", "dist-packages")
_LIBRARY_FOLDERS = ("lib", "lib32", "lib64", "libx32", "usr/lib", "usr/lib32", "usr/lib64", "usr/local/lib", "opt")
_MAX_DEPTH = 6


def distribution(folder: str) -> str:
    """Return the normalized name of the distribution that a `.dist-info` or `.egg-info` is of."""
    return re.sub(r"[-_.]+", "-", re.split(r"-\d|\.(dist|egg)-info", folder)[0]).lower()


def plain(name: str) -> str:
    """Return the name of a program without its version: python3.11 is python."""
    return name.rstrip("0123456789.") or name


class ImageContents:
    """The layers `lower` of an image, the uppermost first, and where it looks for programs.

    Raises OSError if one of the layers cannot be read.
    """

    def __init__(self, lower: Sequence[str], bin_folders: Iterable[str]) -> None:
        for each in lower:
            os.listdir(each)
        self.lower = lower
        self.bin_folders = [folder.strip("/") for folder in bin_folders]

    def place(self, path: str) -> str:
        """Return where a path of the image is on this node; empty if it has none."""
        return next((f"{each}/{path}" for each in self.lower if os.path.lexists(f"{each}/{path}")), "")

    @cached_property
    def programs(self) -> frozenset[str]:
        """The names of its programs, with and without their versions."""
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
        """The names of its shared libraries."""
        return self._walked[0]

    @property
    def sources(self) -> frozenset[str]:
        """The names of files of Perl's and Ruby's modules."""
        return self._walked[3]

    @cached_property
    def interpreters(self) -> frozenset[str]:
        """The names of its folders of standard libraries, such as python3.11."""
        return frozenset(os.path.basename(each) for each in self._walked[1])

    @cached_property
    def standard_modules(self) -> frozenset[str]:
        """The modules of standard libraries, those that the image leaves out too."""
        folders = [name for each in self._walked[1] for name in (each, f"{each}/lib-dynload")]
        return frozenset(_stem(name) for folder in folders for name in _listed(folder)) | sys.stdlib_module_names

    @cached_property
    def installed_modules(self) -> frozenset[str]:
        """The modules and packages that are installed."""
        return frozenset(_stem(name) for each in self._walked[2] for name in _listed(each) if "-info" not in name)

    @cached_property
    def distributions(self) -> frozenset[str]:
        """The normalized names of distributions that are installed."""
        return frozenset(distribution(name) for each in self._walked[2] for name in _listed(each) if "-info" in name)


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _walk(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk folders that loaders find libraries in, and not those of installed packages."""
    if os.path.islink(top):
        # an absolute one would lead to the node's own
        return
    depth = top.count("/") + _MAX_DEPTH
    for folder, names, files in os.walk(top):
        yield folder, list(names), files
        if folder.count("/") >= depth:
            names.clear()
        names[:] = [name for name in names if name not in (*SITES, "node_modules", "__pycache__", "modules")]
