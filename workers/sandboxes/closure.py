"""IPython and all it imports, copied from the farm's own environment into one folder that sandboxes see read-only.

Nothing is downloaded, and nothing of the farm itself comes along.
"""

from __future__ import annotations

import compileall
import re
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from farm.settings import settings
from workers.sandboxes.content import digest, made_once

INSIDE = "/opt/farm/kernel"
SERVER = "kernel_server.py"
ROOT = "ipython"


def kernel_folder() -> Path:
    """The folder to bind at `INSIDE`: the server, and its packages below `site`. Blocks; the first time for seconds."""
    parts = closure(ROOT)
    server = Path(__file__).with_name(SERVER).read_text()
    name = digest("kernel", sorted((part.name, part.version) for part in parts.values()), server, sys.version)

    def make(folder: Path) -> None:
        (folder / SERVER).write_text(server)
        for part in parts.values():
            _copy(part, folder / "site")
        compileall.compile_dir(folder, quiet=2, stripdir=str(folder), prependdir=INSIDE)

    return made_once(settings().cache / "kernels" / name, make)


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
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        source = Path(str(file.locate()))
        if source.is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / file)
