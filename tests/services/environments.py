"""Environments of packages that many tests need: installed once for all of them, and for later runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.services.apptainer import HOME
from workers.sandboxes.images.environments import environment
from workers.sandboxes.images.image import image

_SHARED = HOME / "cache" / "test-home"


def lend_environment(packages: Sequence[str], *, imported: str = "", without_dependencies: bool = False) -> None:
    """Link the environment that sandboxes of the current farm have for these packages to one that all tests share.

    Programs in it must not need its scripts, which name the interpreter by the path of its installation. If modules are
    `imported`, only they and their imports are compiled, as compiling all would take longer than most tests. Raises
    SandboxError. `without_dependencies` as in `environment`.
    """
    own, host = settings().cache / "environments", image(sandbox_config(), "host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_HOME", str(_SHARED))
        if imported:
            # a 0 sets pip's negative options
            patch.setenv("PIP_NO_COMPILE", "0")
        settings.cache_clear()
        try:
            shared = Path(
                environment(sandbox_config(), packages, host, without_dependencies=without_dependencies).binds[0][0]
            )
            if imported:
                program = [str(shared / "bin/python"), "-c", f"import {imported}"]
                subprocess.run(program, env=os.environ | {"HOME": str(_SHARED)}, check=True)
        finally:
            patch.undo()
            settings.cache_clear()
    if _is_open(shared) and not (link := own / shared.name).exists():
        own.mkdir(parents=True, exist_ok=True)
        link.symlink_to(shared)


def _is_open(folder: Path) -> bool:
    """Return whether the user of root's sandboxes can follow a link to it."""
    return bool(os.geteuid()) or all(above.stat().st_mode & 0o001 for above in (folder, *folder.resolve().parents))
