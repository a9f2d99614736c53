"""The code of kernels in one folder, which sandboxes see read-only at the same path as the node: interpreters that are
forked outside and then join a sandbox must find it in both places.

The folder contains a few modules of the farm, IPython, and Jupyter's client, each with its dependencies, copied from
the farm's environment. Nothing is downloaded, and nothing else of the farm is included.
"""

from __future__ import annotations

import ast
import compileall
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from farm.python_syntax import parsed
from workers.sandboxes.images.content_store import digest, made_once

PROGRAMS = tuple(f"workers.sandboxes.kernel.{name}" for name in ("ipython_server", "jupyter_bridge", "zygote"))
"""The modules that are run. The farm's modules that they import are copied, too."""
_FARM = ("farm", "workers")
_PROJECT = Path(__file__).parents[3]
PACKAGES = {"ipython": "ipython", "jupyter": "jupyter_client"}
"""Folder → distribution that is copied there with its dependencies; `PACKAGES` of a program names its folder."""

_NEVER_READ = {".pyc", ".pyi"}
"""Suffixes of files that are not copied: compiled files and type stubs, which are half of all files."""

BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from workers.sandboxes.kernel.{module} import main; main()"
"""Code for `python3 -c` that runs one of the modules; its first argument is the folder."""
_lock = threading.Lock()


def kernel_folder(cache_folder: Path) -> Path:
    """Return the folder, creating it if it is missing. Blocks, the first time for seconds."""
    with _lock:  # the first of a burst of sandboxes reads the sources, the others wait for it
        return _kernel_folder(cache_folder)


@cache
def _kernel_folder(cache_folder: Path) -> Path:
    parts = {folder: closure(name).values() for folder, name in PACKAGES.items()}
    versions = {
        folder: sorted((part.name, part.version) for part in distributions) for folder, distributions in parts.items()
    }
    sources = own_modules()
    folder = cache_folder / "kernels" / digest("kernel", versions, sources, sys.version)

    def make(temporary: Path) -> None:
        for file, source in sources.items():
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            (temporary / file).write_text(source)
        for name, distributions in parts.items():
            for part in distributions:
                _copy(part, temporary / name)
        compileall.compile_dir(temporary, quiet=2, stripdir=str(temporary), prependdir=str(folder))

    return made_once(folder, make)


def own_modules() -> dict[str, str]:
    """Return the sources of the programs and of the farm's modules that they import, by file."""
    sources: dict[str, str] = {}
    todo = [*PROGRAMS]
    while todo:
        *packages, name = todo.pop().split(".")
        if not packages or packages[0] not in _FARM:
            continue
        path = "/".join([*packages, name])
        parents = ("/".join([*packages[:depth], "__init__.py"]) for depth in range(1, len(packages) + 1))
        # an import may name a module, a package or a name in one; parent packages are imported first
        for file in (f"{path}.py", f"{path}/__init__.py", *parents):
            if file not in sources and (_PROJECT / file).is_file():
                sources[file] = (_PROJECT / file).read_text()
                todo += _imported(sources[file])
    return sources


def _imported(source: str) -> Iterator[str]:
    """Yield the names that a module may import, including imports in functions."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "an import in the farm names its whole module"
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def closure(name: str) -> dict[str, Distribution]:
    """Return a distribution and its installed dependencies; others are for other platforms or are extras."""
    distributions: dict[str, Distribution] = {}
    todo = [name]
    while todo:
        key = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            part = distributions.get(key) or distribution(key)
        except PackageNotFoundError:
            continue
        if key not in distributions:
            distributions[key] = part
            wanted = (line for line in part.requires or () if "extra ==" not in line)
            todo += [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in wanted]
    return distributions


def _copy(part: Distribution, target: Path) -> None:
    for file in part.files or ():
        # scripts and manual pages are outside of this folder
        if ".." in file.parts or file.suffix in _NEVER_READ:
            continue
        source = Path(str(file.locate()))
        if source.is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / file)
