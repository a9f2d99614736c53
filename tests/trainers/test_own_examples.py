"""The trainers' own examples play on the farm with the lines that the pages name, and the pages' commands are read."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.trainers.conftest import PROGRAMS, ROOT, Program


def test_trls_own_script_trains_through_the_farm(run: Program, model_text: Path) -> None:
    facts = run("own_examples/trl_script", model_text, path=PROGRAMS)
    assert facts["steps"] == [1, 2, 3]
    assert facts["added"] == 5, "the number of lines in docs/trainers.md"
    assert any(0 < entry["reward"] < 1 for entry in facts["logs"])
    assert any(entry["grad_norm"] > 0 for entry in facts["logs"])


def test_trls_asynchronous_trainer_trains_through_the_farm(run: Program, model_text: Path) -> None:
    facts = run("own_examples/trl_async_script", model_text, path=PROGRAMS)
    assert facts["steps"] == [1, 2, 3]
    assert facts["finite"]
    assert any(0 < reward < 1 for reward in facts["rewards"])
    first, *later = facts["pushed"]
    assert first["engines"] == 1, "the weights that it begins with are pushed before the first rollout"
    assert later
    assert later[-1]["sum"] != first["sum"], "the weights that it trained are pushed"
    assert facts["version"] == str(facts["model_version"])


@pytest.mark.parametrize("name", ["docs/trainers/verl.md", "examples/trainers/verl_farm.py"])
def test_the_command_for_verl_is_one_that_verl_reads(run: Program, name: str) -> None:
    _, _, rest = (ROOT / name).read_text().replace("\\\n", " ").partition("-m verl.trainer.main_ppo ")
    command, dots, _ = rest.partition(" ...")
    assert dots
    facts = run("own_examples/verl_command", *shlex.split(command))
    assert facts["manager"] in {"my_farm.Manager", "verl_farm.Manager"}
