"""What kernels run, in one folder that sandboxes see read-only, at the path that it has on the node: interpreters that
are forked outside and move inside must find it in both places.

Our few modules, and IPython, and Jupyter's client, each with all it imports, copied from the farm's own environment.
Nothing is downloaded, and nothing else of the farm comes along.
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
from workers.sandboxes.content import digest, made_once

MODULES = ("cells", "joining", "jupyter_bridge", "kernel_server", "kernel_zygote", "linux", "seccomp")
PACKAGES = {"ipython": "ipython", "jupyter": "jupyter_client"}
"""Folders, and the distribution whose closure lies in each; `PACKAGES` of a program names the one that it needs."""

_NEVER_READ = {".pyc", ".pyi"}
"""Compiled anew, and stubs for type checkers; half of all the files."""

BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from workers.sandboxes.{module} import main; main()"
"""Given to `python3 -c`, with the folder as first argument: runs one of the modules."""


def kernel_folder() -> Path:
    """The folder. Blocks; the first time for seconds."""
    return _kernel_folder(settings().cache.absolute())


@cache
def _kernel_folder(place: Path) -> Path:
    parts = {folder: closure(name).values() for folder, name in PACKAGES.items()}
    versions = {folder: sorted((part.name, part.version) for part in found) for folder, found in parts.items()}
    sources = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in MODULES}
    folder = place / "kernels" / digest("kernel", versions, sources, sys.version)

    def make(temporary: Path) -> None:
        package = temporary / "workers" / "sandboxes"
        package.mkdir(parents=True)
        for name, source in {**sources, "__init__": "", "../__init__": ""}.items():
            (package / f"{name}.py").write_text(source)
        for name, found in parts.items():
            for part in found:
                _copy(part, temporary / name)
        compileall.compile_dir(temporary, quiet=2, stripdir=str(temporary), prependdir=str(folder))

    return made_once(folder, make)


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and all that it needs, as far as installed: what is not is for another platform, or an extra."""
    found: dict[str, Distribution] = {}
    todo = [name]
    while todo:
        key = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            part = found.get(key) or distribution(key)
        except PackageNotFoundError:
            continue
        if key not in found:
            found[key] = part
            todo += [_name(line) for line in part.requires or () if "extra ==" not in line]
    return found


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
