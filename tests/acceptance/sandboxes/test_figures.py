"""Figures of matplotlib, installed in the sandbox on request, as results of the python tool."""

from __future__ import annotations

import asyncio
import os

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.integration.conftest import provider as provider
from workers.plugins.interfaces import Observation
from workers.sandboxes.namespace import NamespaceProvider
from workers.tools.python import PythonArguments, PythonTool

CELLS = (
    "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]);",
    "plt.plot([1]); plt.show(); print('after')",
    "plt.figure(); plt.plot([1]); 1 / 0",
    "figure, axes = plt.subplots(); plt.close(); figure",
    "1",
    "!python3 -c 'import matplotlib.pyplot as p; p.plot([1]); p.savefig(\"f.png\"); print(p.get_backend())'",
)


def test_figures_are_returned_as_images(provider: NamespaceProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    # two processes import a tenth of it, as compiling all would take longer; a 0 sets pip's negative options
    monkeypatch.setenv("PIP_NO_COMPILE", "0")

    async def main() -> list[Observation]:
        try:
            sandbox = await provider.start(f"figures-{os.getpid()}", SandboxSpec(packages=("matplotlib==3.11.2",)))
        except SandboxError as error:
            absent(f"no sandbox with matplotlib, which comes from the package index: {error}")
        try:
            tool = PythonTool(sandbox)
            return [await tool.call(PythonArguments(code=code), 120) for code in CELLS]
        finally:
            await sandbox.stop()

    drawn, shown, failed, value, nothing, program = asyncio.run(main())
    for observation in (drawn, shown, failed, value):
        assert [artefact.data[:8] for artefact in observation.artefacts] == [b"\x89PNG\r\n\x1a\n"]
        assert "[image/png, " in observation.text
        assert "<Figure size" in observation.text
    assert shown.text.index("<Figure size") < shown.text.index("after")
    assert "ZeroDivisionError" in failed.text
    assert (nothing.text, nothing.artefacts) == ("Out[5]: 1", ())
    # a program has nobody to show it to
    assert program.text.splitlines()[-1] == "agg"
