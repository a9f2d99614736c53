"""The code of kernels, in one folder that sandboxes see read-only, at its path on the node: interpreters that are
forked outside and join a sandbox must find it in both places.

A few modules of the farm, and IPython, and Jupyter's client, each with all it imports, copied from the farm's own
environment. Nothing is downloaded, and nothing else of the farm is included.
"""

from __future__ import annotations

import compileall
import re
import shutil
import sys
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from farm.settings import settings
from workers.sandboxes.images.content_store import digest, made_once

MODULES = {
    "isolation": ("ignored_sigterm", "kernel_limits", "linux", "namespaces", "seccomp", "system_calls"),
    "kernel": ("cell_protocol", "ipython_server", "jupyter_bridge", "zygote"),
}
"""The modules that are copied, by their package below `workers.sandboxes`."""
_SANDBOXES = Path(__file__).parents[1]
PACKAGES = {"ipython": "ipython", "jupyter": "jupyter_client"}
"""Folders, and the distribution whose closure lies in each; `PACKAGES` of a program names the one that it needs."""

_NEVER_READ = {".pyc", ".pyi"}
"""Suffixes of files that are not copied: compiled anew, and stubs for type checkers; half of all the files."""

BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from workers.sandboxes.kernel.{module} import main; main()"
"""Given to `python3 -c`, with the folder as first argument: runs one of the modules."""


def kernel_folder() -> Path:
    """Return the folder, made if need be. Blocks; the first time for seconds."""
    return _kernel_folder(settings().cache.absolute())


@cache
def _kernel_folder(place: Path) -> Path:
    parts = {folder: closure(name).values() for folder, name in PACKAGES.items()}
    versions = {folder: sorted((part.name, part.version) for part in result) for folder, result in parts.items()}
    files = [f"{room}/{name}.py" for room, names in MODULES.items() for name in names]
    sources = {file: (_SANDBOXES / file).read_text() for file in files}
    folder = place / "kernels" / digest("kernel", versions, sources, sys.version)

    def make(temporary: Path) -> None:
        package = temporary / "workers" / "sandboxes"
        rooms = [package / room for room in MODULES]
        for room in rooms:
            room.mkdir(parents=True)
        for empty in (package.parent, package, *rooms):
            (empty / "__init__.py").touch()
        for file, source in sources.items():
            (package / file).write_text(source)
        for name, result in parts.items():
            for part in result:
                _copy(part, temporary / name)
        compileall.compile_dir(temporary, quiet=2, stripdir=str(temporary), prependdir=str(folder))

    return made_once(folder, make)


def closure(name: str) -> dict[str, Distribution]:
    """Return a distribution and all that it needs, as far as installed: the rest is for other platforms, or extras."""
    result: dict[str, Distribution] = {}
    todo = [name]
    while todo:
        key = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            part = result.get(key) or distribution(key)
        except PackageNotFoundError:
            continue
        if key not in result:
            result[key] = part
            todo += [_name(line) for line in part.requires or () if "extra ==" not in line]
    return result


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0] if match else ""


def _copy(part: Distribution, target: Path) -> None:
    for file in part.files or ():
        # scripts and manual pages lie outside, above
        if ".." in file.parts or file.suffix in _NEVER_READ:
            continue
        source = Path(str(file.locate()))
        if source.is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / file)
