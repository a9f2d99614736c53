"""List the partially installed packages of this environment: `whole_packages.py [--repair]`.

A killed installer leaves some files of a package behind. If its metadata is among them, the next installer takes it for
installed. With `--repair` this metadata is removed.
Without it, the exit status is 1 if there is such a package.
"""

from __future__ import annotations

import csv
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def half_installed(site: Path) -> Iterator[Path]:
    """Yield the metadata of each partially installed package, and the remains of partially removed ones."""
    yield from site.glob("~*")
    for metadata in site.glob("*.dist-info"):
        # pip and uv write INSTALLER after all other files of a package
        if not all((metadata / name).exists() for name in ("METADATA", "INSTALLER", "RECORD")):
            yield metadata
            continue
        with (metadata / "RECORD").open(newline="") as record:
            files = [row[0] for row in csv.reader(record) if row and not row[0].endswith(".pyc")]
        if not all((site / name).exists() for name in files):
            yield metadata


def main() -> None:
    """Print partially installed packages, and remove their metadata if requested."""
    removes = "--repair" in sys.argv[1:]
    broken = sorted(set(half_installed(Path(sysconfig.get_path("purelib")))))
    for path in broken:
        print(f"  not whole: {path.name}")
        if removes and path.is_dir():
            shutil.rmtree(path)
        elif removes:
            path.unlink()
    sys.exit(bool(broken) and not removes)


if __name__ == "__main__":
    main()
