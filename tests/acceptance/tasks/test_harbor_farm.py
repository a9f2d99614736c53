"""A folder of Harbor tasks, submitted over HTTP to a whole farm whose policy runs the solutions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import farm
from farm.cli.main import main
from farm.client.farm import Farm
from farm.client.local import LocalFarm
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.doubles import EngineDouble
from tests.services.api import KEY, served, shown_key
from tests.services.commands import output_of
from tests.services.farms import embedded, farm_folder, left_of, until
from tests.services.task_images import task_base
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.images.image import set_alias
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

SAMPLES = Path(__file__).parents[3] / "examples" / "tasks" / "harbor"
SUBMIT = ScriptedTurn(tool_calls=(ScriptedCall(name="submit", arguments={"answer": "done"}),))


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


def solved(match: str, *solutions: str) -> ScriptedProblem:
    """Return a script that runs each step's solution, and submits its work."""
    turns = [turn for each in solutions for turn in (bash((SAMPLES / each / "solve.sh").read_text()), SUBMIT)]
    return ScriptedProblem(match=match, branches=(Branch(name="solution", turns=tuple(turns)),))


SCRIPT = Script(
    [
        solved("three text files", "count-words/solution"),
        solved("todo.py add TEXT", "two-steps/steps/add/solution", "two-steps/steps/count/solution"),
    ]
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the HTTP address of a farm in which the samples' base images exist by name."""
    if missing := provider("namespace").missing():
        absent(missing)
    base = tmp_path_factory.mktemp("base")
    base.chmod(0o755)
    double = EngineDouble(SCRIPT, weight_version="1")
    with farm_folder() as folder, ExitStack() as stack:
        with farm_in(folder):
            for name in ("debian:bookworm-slim", "python:3.11-slim"):
                set_alias(sandbox_config(), name, str(task_base(base) if name.startswith("debian") else base))
        here = stack.enter_context(embedded(folder, FARM_SANDBOX="namespace"))
        local = stack.enter_context(farm.connect(here.store_url, broker_url=here.broker_url))
        assert isinstance(local, LocalFarm)
        local.add_engine(f"{stack.enter_context(serving(double.app()))}/v1")
        until(lambda: local.engines()[0].engine.info is not None, "the engine was asked what it can do")
        stack.enter_context(shown_key())
        yield stack.enter_context(served(local))
        stack.close()
        assert left_of(folder) == []


@pytest.fixture
def client(url: str) -> Iterator[Farm]:
    with farm.connect(url) as connected:
        yield connected


def test_folder_of_tasks_is_submitted_and_its_solutions_are_rewarded(url: str, client: Farm, tmp_path: Path) -> None:
    for name in ("count-words", "two-steps"):
        shutil.copytree(SAMPLES / name, tmp_path / name)
    env = {"FARM_API_KEY": KEY}
    batch_id = output_of(main, "submit", str(tmp_path), "-n", "2", "--url", url, env=env).split()[0]
    rollouts = client.collect(batch_id, timeout_s=300)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4, [rollout.failure for rollout in rollouts]
    # a further step continues the same conversation: its row begins with the ids that were sampled before
    assert [len(rollout.segments) for rollout in rollouts] == [1] * 4
    document = json.loads(output_of(main, "show", rollouts[-1].rollout_id, "--atif", "--url", url, env=env))
    steps = document["steps"]
    assert [step["step_id"] for step in steps] == [*range(1, len(steps) + 1)]
    assert [step["source"] for step in steps].count("user") == 2
    assert all(step["metrics"]["completion_token_ids"] for step in steps if step["source"] == "agent")


def test_folder_with_an_unsupported_task_submits_nothing(url: str, client: Farm, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "count-words", tmp_path / "count-words")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text('schema_version = "1.4"\n[environment]\ngpus = 1\n')
    before = len(client.batches())
    error = output_of(main, "submit", str(tmp_path), "--url", url, code=1, env={"FARM_API_KEY": KEY})
    assert "broken" in error
    assert len(client.batches()) == before
