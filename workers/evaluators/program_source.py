"""Builds programs for other processes and sandboxes from the sources of this package's modules."""

from __future__ import annotations

import re
from importlib.resources import files

_IMPORT = re.compile(r"^from (?:workers\.[\w.]+|__future__) import (?:\([^)]*\)|.*)\n", re.MULTILINE)


def source_of(*modules: str) -> str:
    """Return the sources of modules of `workers.evaluators`, by dotted names, as one program.

    Their imports of each other are omitted, so each must come after those that it uses.
    """
    sources = []
    for name in modules:
        package, _, module = f"workers.evaluators.{name}".rpartition(".")
        sources.append(files(package).joinpath(f"{module}.py").read_text(encoding="utf-8"))
    return "\n".join(["from __future__ import annotations", *(_IMPORT.sub("", source) for source in sources)])
