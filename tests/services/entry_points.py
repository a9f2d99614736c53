"""A project whose entry points are installed, as by `pip install`, in a separate folder."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farm import plugins


def install(project: Path, site: Path) -> None:
    """Write the metadata of a project, from its pyproject.toml, and a path to its modules, into a folder."""
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name, version = described["name"], described["version"]
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = described["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items()) for group, points in groups.items()]
    (metadata / "entry_points.txt").write_text("".join(lines))
    for module in project.glob("*.py"):
        (site / module.name).symlink_to(module)


@contextmanager
def installed(project: Path, site: Path) -> Iterator[None]:
    """Install a project for this process while the block runs."""
    install(project, site)
    sys.path.insert(0, str(site))
    plugins.find_installed()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for module in project.glob("*.py"):
            # the next installation uses another folder
            sys.modules.pop(module.stem, None)
        plugins.find_installed()
