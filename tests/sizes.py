"""Hints on size: `python -m tests.sizes` lists long modules and full folders. It never fails.

A long module may contain two concepts, and a full folder two topics. Split them only for that reason.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE_LINES = 400
FOLDER_FILES = 20


def hints(root: Path = ROOT) -> list[str]:
    """Return one line for each module of the product, and for each folder, beyond the limits of the hints."""
    product = sorted(path for package in ("farm", "workers") for path in (root / package).rglob("*.py"))
    lengths = {path: len(path.read_text().splitlines()) for path in product}
    folders = Counter(path.parent for path in [*product, *(root / "tests").rglob("*.py")])
    return [
        *(f"{path.relative_to(root)}: {n} lines" for path, n in lengths.items() if n > MODULE_LINES),
        *(f"{path.relative_to(root)}/: {n} files" for path, n in sorted(folders.items()) if n > FOLDER_FILES),
    ]


if __name__ == "__main__":
    for hint in hints():
        print(f"hint: {hint}; does it hold two topics?")
