"""The log lines of a rollout's processes: each stage ends with a line with its ids, and `farm logs` prints them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import farm
from farm.records.rollout import State
from tests.doubles import EngineDouble
from tests.services.farms import embedded, farm_folder, until
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTION = "How many hops?"
SCRIPT = Script(
    [ScriptedProblem(match=QUESTION, branches=(Branch(name="right", turns=(ScriptedTurn(content="three"),)),))]
)
FIELDS = re.compile(r"^\S+ \S+ (?P<level>\w+) \S+/(?P<process>\w+) \S+: (?P<message>.*) \[(?P<fields>[^]]*)\]$")


def printed(home: Path, ref: str) -> list[str]:
    command = [sys.executable, "-m", "farm.cli.main", "logs", ref, "--in", str(home / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def read(line: str, form: str) -> dict[str, str]:
    if form == "json":
        return {name: str(value) for name, value in json.loads(line).items()}
    found = FIELDS.match(line)
    assert found is not None, line
    return found.groupdict() | dict(each.split("=", 1) for each in found["fields"].split())


@pytest.mark.parametrize("form", ["text", "json"])
def test_each_stage_ends_with_a_log_line_with_its_ids(form: str) -> None:
    chat = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}
    long = {"data_source": "noop", "fields": {"seconds": 600.0}}
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT).app()) as engine,
        embedded(folder, FARM_POLICY_URL=f"{engine}/v1", FARM_LOG=form) as here,
        farm.connect(here.home) as client,
    ):
        batch_id = client.submit({"instances": [chat], "n_samples": 2})
        cancelled = client.submit({"instances": [long]})
        client.wait(batch_id, timeout_s=60)
        until(lambda: client.rollouts(cancelled)[0].state is State.ACTIVE, "it runs")
        client.cancel(cancelled)
        client.wait(cancelled, timeout_s=60)
        for sample in (0, 1):
            rollout_id = f"{batch_id}.0.{sample}"
            lines = [read(line, form) for line in printed(here.home, rollout_id)]
            assert {line["rollout_id"] for line in lines} == {rollout_id}
            ends = [line for line in lines if line["message"].startswith("Stage ended after ")]
            assert [(end["stage"], end["process"], end["attempt"]) for end in ends] == [
                (stage, stage, "1") for stage in ("init", "run", "eval")
            ]
            assert [end["message"].partition("s: ")[2] for end in ends] == [
                *("advanced to run", "advanced to eval: answered, 1 turns", "reward 1, answered"),
            ]
            assert [end.get("engine") for end in ends] == [None, f"{engine}/v1", None]
        assert len(printed(here.home, batch_id)) >= 6
        until(
            lambda: any("(cancelled)" in read(line, form)["message"] for line in printed(here.home, cancelled)),
            "the end of what was cancelled is logged",
        )
