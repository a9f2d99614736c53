"""The examples of docs/how-to/users/tasks/ run unchanged, on a farm with a scripted policy and a judge of the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.errors import InvalidRequest
from tests.doubles import EngineDouble
from tests.services.farms import embedded, farm_folder, paths_below
from workers.testing.engine import MODEL
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]
KEY = "sk-of-the-judge-alone"
REPLIES = {
    "How many positive divisors has 360?": "\\boxed{24}",
    "Compute 1/2 + 1/3.": "Answer: $5/6$",
    "What is the pH": "\\boxed{C}",
    "Which organelle": "\\boxed{mitochondria}",
    "Print the sum": "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```",
    "Print the mean": "```python\nv = [*map(float, input().split())]\nprint(sum(v) / len(v))\n```",
}
SHORT = {"question": "Which organelle makes most of the ATP?", "answer": "the mitochondrion", "answer_type": "String"}


def script(replies: dict[str, str]) -> Script:
    branches = {text: (Branch(name="only", turns=(ScriptedTurn(content=reply),)),) for text, reply in replies.items()}
    return Script([ScriptedProblem(match=text, branches=branches_of) for text, branches_of in branches.items()])


@dataclass(slots=True)
class JudgedFarm:
    """A farm, and a judge that is not one of its engines."""

    here: Embedded
    client: farm.Farm
    judge: EngineDouble
    judge_url: str


@pytest.fixture(scope="module")
def bench() -> Iterator[JudgedFarm]:
    judge = EngineDouble(script({"Gold answer": "The same. \\boxed{YES}"}), wire="openai", key=KEY)
    with (
        farm_folder() as folder,
        serving(EngineDouble(script(REPLIES), weight_version="1").app()) as url,
        serving(judge.app()) as judge_url,
        embedded(folder, FARM_POLICY_URL=f"{url}/v1", FARM_SANDBOX="namespace", FARM_RETRY_S="0.05") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        yield JudgedFarm(here, client, judge, f"{judge_url}/v1")


def run_example(bench: JudgedFarm, page: str) -> dict[str, Any]:
    """Run the example of a page; return its names."""
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/how-to/users/tasks" / page).read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"client": bench.client, "judge_url": bench.judge_url, "judge_key": KEY}
    program = program.replace("client = farm.connect()\n", "").replace('"model": "judge"', f'"model": "{MODEL}"')
    exec(program, names)
    return names


def test_math_example_is_scored(bench: JudgedFarm) -> None:
    assert run_example(bench, "math.md")["rewards"] == [1.0] * 4


def test_stem_example_is_scored_by_rules_and_a_judge_with_a_hidden_key(bench: JudgedFarm) -> None:
    before = bench.judge.n_started
    names = run_example(bench, "stem.md")
    assert names["rewards"] == [0.0, 1.0], [rollout.failure for rollout in names["rollouts"]]
    assert bench.judge.n_started == before + 1, "what rules decide is not asked, and a judge is never probed"
    details = names["score"].details
    assert (details["rule"], details["judge"]["votes"], details["judge"]["model"]) == ("judge", [True], MODEL)
    batch_id, rollouts = names["batch_id"], names["rollouts"]
    calls = [call.engine for rollout in rollouts for call in bench.client.calls(rollout.rollout_id)]
    assert bench.judge_url not in calls
    shown = repr([bench.client.status(batch_id), rollouts, details, bench.client.engines(), calls])
    logs = [path for path in paths_below(Path(bench.here.home)) if path.suffix == ".log"]
    shown += "".join(log.read_text(errors="replace") for log in logs)
    assert KEY not in shown


def test_code_example_is_scored(bench: JudgedFarm) -> None:
    assert run_example(bench, "code.md")["rewards"] == [1.0, 1.0]


def test_batch_without_a_required_judge_is_refused(bench: JudgedFarm) -> None:
    with pytest.raises(InvalidRequest, match="needs an LLM for the role 'judge'") as refusal:
        bench.client.submit({"instances": [{"data_source": "answer", "fields": SHORT}]})
    assert refusal.value.field == "instances[0].fields"


def test_judge_that_refuses_its_key_gives_no_reward(bench: JudgedFarm) -> None:
    rows = [{"data_source": "answer", "fields": SHORT | {"question": "Which organelle is it?"}}]
    roles = {"judge": {"engine_url": bench.judge_url, "engine_key": "wrong", "model": MODEL}}
    request = {"instances": rows, "roles": roles, "max_attempts": 1}
    (rollout,) = bench.client.collect(bench.client.submit(request), timeout_s=600)
    assert (rollout.outcome, rollout.reward) == ("engine_error", None)
    assert rollout.failure is not None
    assert "role judge" in rollout.failure.message
