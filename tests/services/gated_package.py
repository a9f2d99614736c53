"""A source package whose build waits for a file, so that a test controls the duration of its installation."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

REQUIREMENT = "gated==1.0"

_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
_BACKEND = """
import pathlib, time, zipfile

GATE, BEGUN = pathlib.Path({gate!r}), pathlib.Path({begun!r})
METADATA = "Metadata-Version: 2.1\\nName: gated\\nVersion: 1.0\\n"

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with BEGUN.open("a") as log:
        log.write("begun\\n")
    while not GATE.exists():
        time.sleep(0.05)
    name = "gated-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("gated.py", "")
        wheel.writestr("gated-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("gated-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("gated-1.0.dist-info/RECORD", "")
    return name
"""


class GatedPackage:
    """`gated==1.0`, for a pip with the variables `environment`; `n_builds` have begun, and end once it is opened."""

    def __init__(self, folder: Path) -> None:
        self._gate, self._begun = folder / "gate", folder / "begun"
        self.environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_NO_CACHE_DIR": "1"}
        backend = _BACKEND.format(gate=str(self._gate), begun=str(self._begun))
        texts = {
            "PKG-INFO": "Metadata-Version: 2.1\nName: gated\nVersion: 1.0\n",
            "pyproject.toml": _PROJECT,
            "backend.py": backend,
        }
        with tarfile.open(folder / "gated-1.0.tar.gz", "w:gz") as archive:
            for name, text in texts.items():
                member = tarfile.TarInfo(f"gated-1.0/{name}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))

    @property
    def n_builds(self) -> int:
        return len(self._begun.read_text().splitlines()) if self._begun.exists() else 0

    def open(self) -> None:
        self._gate.touch()
