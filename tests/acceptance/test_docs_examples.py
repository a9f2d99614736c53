"""The examples for trainers in README.md and docs/trainers.md run as they stand, on a farm with a scripted engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farm
from tests.doubles import EngineDouble
from tests.services.farms import embedded, farm_folder, until
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]
BEFORE = f"""
import json
with open({str(ROOT / "examples" / "problems.jsonl")!r}) as file:
    problems = [next(line["fields"] for line in map(json.loads, file) if line["data_source"] == "math")]
problem = problems[0]
trained, pushed = [], []
train_on, push = trained.extend, pushed.extend
"""
AFTER = """
print(json.dumps({
    "batch_id": batch_id,
    "trained": [rollout.reward for rollout in trained],
    "rows": len(globals()["arrays"].rewards) if "arrays" in globals() else None,
    "pushed": len(pushed),
}))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    double = EngineDouble(Script([]), weight_version="1")
    with farm_folder() as folder, embedded(folder, FARM_SANDBOX="namespace") as here, serving(double.app()) as url:
        with farm.connect(here.home) as client:
            client.add_engine(f"{url}/v1")
            until(lambda: client.engines()[0].engine.info is not None, "the engine was asked what it can do")
        yield here.home


def example(page: str, *words: str) -> str:
    """Return the blocks of Python of a page that contain these words, in that order, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(next(block for block in blocks if word in block) for word in words)


def ran(home: Path, program: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + program + AFTER],
        env=os.environ | {"FARM_HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_example_of_the_readme_trains_and_updates_the_weights(home: Path) -> None:
    result = ran(home, example("README.md", "stream_groups"))
    assert len(result["trained"]) == 8
    assert all(reward is not None for reward in result["trained"])
    assert result["pushed"] == 1


def test_example_for_trainers_acknowledges_and_collects_arrays(home: Path) -> None:
    reconnect = "client = farm.connect()\n"
    program = example("docs/trainers.md", "client.rows") + reconnect + example("docs/trainers.md", 'mode="drain"')
    result = ran(home, program)
    assert result["rows"] >= 8
    assert result["pushed"] == 1
    with farm.connect(home) as client:
        assert list(client.stream_groups(result["batch_id"])) == []
