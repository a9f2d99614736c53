"""TRL trains on the CPU through a real farm: whole steps of GRPO, and its handling of a broken rollout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.trainers.conftest import QUESTION, Program


def test_grpo_trains_steps_through_the_farm(run: Program, model_text: Path, tmp_path: Path) -> None:
    facts = run("trl_training", model_text, "trl-run", tmp_path / "policy")
    assert facts["finite"]
    assert facts["moved"]
    assert any(norm > 0 for norm in facts["grad_norms"])
    assert facts["unscored"] == [4, 4, 4], "one problem of three breaks"
    assert facts["reward_of_trl"] == pytest.approx(facts["reward_of_farm"]), (
        "no zero of a broken rollout is in the mean"
    )
    assert [max(each) for each in facts["versions"]] == [0, 1, 2], "each step's weights were pushed before it"
    assert facts["same_rollouts_again"], "a restarted trainer repeats no rollout"
    # the mean and deviation of 1, 0.5 and 0 only; the broken one has none
    assert facts["advantages"] == pytest.approx([1.0, 0.0, 0.0, -1.0], abs=1e-3)
    assert facts["too_long"] == "max_completion_length"
    drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.05, "max_tokens": 64}
    assert drawn.items() <= facts["asked"].items(), "the farm samples by TRL's own arguments"
    assert facts["vocabulary"] == "vocabulary"

    problems = tmp_path / "problems.jsonl"
    fields = {"question": QUESTION, "expected": "three"}
    lines = [json.dumps({"data_source": "chat", "fields": fields, "instance_id": name}) for name in "ab"]
    problems.write_text("\n".join(lines))
    words = ("--model", tmp_path / "policy", "--cpu", "--keep-weights", "--steps", "2", "--samples", "4", problems)
    said = run("examples/trainers/trl_grpo.py", *words)
    assert len(re.findall(r"^step [12]: reward [01]\.\d+, loss", said, re.MULTILINE)) == 2, said


def test_async_grpo_accepts_the_samples_of_the_farms_worker(run: Program) -> None:
    facts = run("trl_async")
    assert facts["version"] == "1", "the sync of weights was a weight update of the farm"
    assert facts["pushed"] == [[1, 1]]
    assert facts["rows"] == 12
    assert facts["lengths"]
    assert facts["groups"] == [0, 2], "a broken group gives no row"
    assert facts["unscored"]
    assert facts["stale"] == 0
    assert facts["packed"]
    assert facts["trained_groups"] >= 2
    assert facts["filtered"] == {"equal": 0, "of_never": 0}, "groups of equal rewards are dropped before TRL sees them"
