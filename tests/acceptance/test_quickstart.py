"""docs/quickstart.md runs unchanged in a fresh folder: its programs are saved, its commands run in one shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.services.farms import farm_folder, left_of
from tests.services.servers.broker import free_ports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
PORT = "8901"
"""The page's port of the scripted engine; the test takes a free one, as farms run in parallel."""


def script_of(text: str) -> str:
    """Return the blocks of a page, in order, as one shell script, which saves programs under the names on the page."""
    script = ["set -euo pipefail"]
    for before, language, block in re.findall(r"([^\n]*\n)\n```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "bash":
            script.append(block)
            continue
        [name] = re.findall(r"Save this program as `([\w.]+)`:", before)
        script.append(f"cat > {name} <<'END OF PROGRAM'\n{block}END OF PROGRAM\n")
    return "\n".join(script)


def ran(folder: Path, script: str) -> str:
    """Run a script in a folder and return its output; nothing that it started outlives the call."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    env |= {"FARM_SCRATCH": str(folder.parent / "scratch"), "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None or process.returncode:
            os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, output
    return output


def test_every_block_of_the_page_runs_in_order() -> None:
    text = PAGE.read_text()
    script = script_of(text)
    blocks = re.findall(r"^```\w+\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert all(block.partition("\n")[2].removesuffix("```") in script for block in blocks)
    [port] = free_ports(1)
    with farm_folder() as made:
        folder = made / "work"
        folder.mkdir()
        output = ran(folder, script.replace(PORT, str(port)))
        with np.load(folder / "quickstart" / "batch.npz") as batch:
            rewards = batch["rewards"]
        assert left_of(made) == []
    assert len(rewards) == 16
    assert {*rewards.tolist()} == {0.0, 1.0}
    groups = [json.loads(line) for line in output.splitlines() if line.startswith('{"rewards"')]
    assert [len(group["rewards"]) for group in groups] == [4, 4]
    assert all(group["tokens"] > 0 for group in groups)
