"""The examples for trainers, and those of the pages on tasks, run unchanged, on a farm with a scripted engine."""

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
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]
USERS = "docs/how-to/users"
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

SUBMIT = ScriptedTurn(tool_calls=(ScriptedCall(name="submit", arguments={"answer": "5"}),))


def gold_patch_script() -> ScriptedProblem:
    """Return the script of the first bug: apply the gold patch, and submit."""
    row = json.loads((ROOT / "examples/data/swe/swebench_5_form.jsonl").read_text().splitlines()[0])
    command = f"git apply - <<'PATCH'\n{row['patch']}PATCH"
    turn = ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))
    return ScriptedProblem(match="plural() is wrong", branches=(Branch(name="gold", turns=(turn, SUBMIT)),))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    others = [
        ScriptedProblem(match=text, branches=(Branch(name="5", turns=(SUBMIT,)),))
        for text in ("wrap(", "2 + 3 =", "4 + 4 =")
    ]
    double = EngineDouble(Script([gold_patch_script(), *others]), weight_version="1")
    with farm_folder() as folder, embedded(folder, FARM_SANDBOX="namespace") as here, serving(double.app()) as url:
        with farm.connect(here.home) as client:
            client.add_engine(f"{url}/v1")
            until(lambda: client.engines()[0].engine.info is not None, "the engine was asked what it can do")
        yield here.home


def example(page: str, *words: str) -> str:
    """Return the Python blocks of a page that contain these words, in that order, as one program."""
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
    page = f"{USERS}/trainers.md"
    program = example(page, "client.rows") + reconnect + example(page, 'mode="drain"')
    result = ran(home, program)
    assert result["rows"] >= 8
    assert result["pushed"] == 1
    with farm.connect(home) as client:
        assert list(client.stream_groups(result["batch_id"])) == []


def ran_page(home: Path, folder: Path, page: str) -> Any:
    """Run the Python of a page in a folder with the examples; return its `rewards`."""
    (folder / "examples").symlink_to(ROOT / "examples")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(json.dumps(rewards))"],
        env=os.environ | {"FARM_HOME": str(home), "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_swe_bench_page_scores_its_rows(home: Path, tmp_path: Path) -> None:
    assert ran_page(home, tmp_path, f"{USERS}/tasks/swe.md") == {"farm__wordkit-1": 1.0, "farm__wordkit-2": 0.0}


def test_rows_page_scores_its_rows(home: Path, tmp_path: Path) -> None:
    assert sorted(ran_page(home, tmp_path, f"{USERS}/tasks/rows.md")) == [0.0, 1.0]
