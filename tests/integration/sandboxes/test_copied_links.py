"""Links in a folder that is copied out of a sandbox: those within it lead to the same file of the copy."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS

LINKS = {
    "beside": "real",
    "whole": "/out/real",
    "of_a_folder": "/out/deep",
    "deep/up": "/out/deep/../real",
    "deep/whole": "/out/real",
    "self": "/out",
    "leaves": "/etc/passwd",
    "leaves_by_name": "/outside",
    "leaves_upwards": "/out/../etc/passwd",
    "leaves_beside": "../etc/passwd",
    "dangling": "/out/absent",
}
WITHIN = {
    "beside": "real",
    "whole": "real",
    "of_a_folder": "deep",
    "deep/up": "../real",
    "deep/whole": "../real",
    "self": ".",
    "dangling": "absent",
}


@pytest.mark.parametrize("kind", PROVIDERS)
def test_links_within_a_folder_are_copied(kind: str, tmp_path: Path) -> None:
    provider = PROVIDERS[kind]()
    if missing := provider.missing():
        absent(missing)
    made = " ".join(f"&& ln -s {target} /out/{name}" for name, target in LINKS.items())

    async def copy() -> None:
        sandbox = await provider.start(f"test-{uuid.uuid4().hex[:12]}", SandboxSpec())
        try:
            command = f"mkdir -p /out/deep /outside && echo 42 > /out/real {made}"
            result = await sandbox.exec(["bash", "-c", command], timeout_s=60.0)
            assert result.code == 0, result
            await sandbox.download("/out", tmp_path / "out")
        finally:
            await sandbox.stop()

    asyncio.run(copy())
    top = tmp_path / "out"
    found = {str(path.relative_to(top)): str(path.readlink()) for path in top.rglob("*") if path.is_symlink()}
    assert found == WITHIN
    assert (top / "deep/whole").read_text() == "42\n"
