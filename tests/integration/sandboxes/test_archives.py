"""Archives and packages from the package index, in real sandboxes."""

from __future__ import annotations

import asyncio
import os

import pytest

from farm.errors import SandboxError
from farm.records.request import Archive, SandboxSpec
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.archives import layer
from workers.sandboxes.namespace import NamespaceProvider

SIX = Archive(name="six", version="1.17.0", sha256="ff70335d468e7eb6ec65b95b99d3a2836546063f63acc5171de367e834932a81")


def test_archive_and_package_are_installed_in_a_sandbox(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(archives=(SIX,), packages=("iniconfig==2.1.0",))

    async def main() -> bytes:
        sandbox = await provider.start(f"archive-{os.getpid()}", spec)
        try:
            script = "sed -i 's/^__version__.*/__version__ = \"mine\"/' six.py && python -c "
            script += "'import six, iniconfig; print(six.__version__, six.__file__, iniconfig.__name__)'"
            result = await sandbox.exec(["bash", "-c", script], timeout_s=20)
            assert result.code == 0, result.stderr
            return result.stdout
        finally:
            await sandbox.stop()

    assert asyncio.run(main()) == b"mine /workspace/six.py iniconfig\n"
    assert '"1.17.0"' in (layer(sandbox_config(), SIX) / "workspace/six.py").read_text()


def test_archive_with_a_wrong_digest_is_refused(provider: NamespaceProvider) -> None:
    with pytest.raises(SandboxError, match=r"six 1\.17\.0: the package index has no source archive"):
        layer(sandbox_config(), SIX.model_copy(update={"sha256": "0" * 64}))


def test_missing_package_is_an_error(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(packages=("iniconfig==0.0.0.dev99",))
    with pytest.raises(SandboxError, match=r"iniconfig==0\.0\.0\.dev99"):
        asyncio.run(provider.start("never", spec))
