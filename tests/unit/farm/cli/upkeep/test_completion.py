"""Shell completion: the scripts are valid, and commands, options and batches are completed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.store.database import Store
from tests.contract.store.test_store import announce
from tests.services.farms import NOOP

FARM = Path(sys.executable).parent / "farm"


def completed(line: str, **env: str) -> list[str]:
    """Return the words that bash proposes for a line whose last word is incomplete."""
    words = line.split(" ")
    variables = {"_FARM_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = subprocess.run(
        [FARM], env=os.environ | variables | env, capture_output=True, text=True, timeout=600, check=True
    )
    return [word.partition(",")[2] for word in result.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    script = subprocess.run([FARM, "completion", shell], capture_output=True, text=True, timeout=600, check=True).stdout
    assert f"_FARM_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=600)


def test_commands_options_and_batches_are_completed(sqlite_store: Store) -> None:
    announce(sqlite_store)
    batch_id = LocalFarm(sqlite_store, Signals(""), 1000).submit({"instances": [NOOP]})
    assert completed("farm wa") == ["watch"]
    assert completed("farm watch --ex") == ["--exit-status"]
    assert completed(f"farm watch {batch_id[:3]}", FARM_STORE_URL=sqlite_store.url) == [batch_id]
    assert completed("farm watch b", FARM_STORE_URL="postgresql://nobody@127.0.0.1:1/none") == []
