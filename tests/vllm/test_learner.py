"""The pure parts of the trainer of `make train`, in the Python that has torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checked(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [str(vllm_python), "-m", "tests.vllm.learner_checks", str(tmp_path_factory.mktemp("learner"))]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_loss_equals_an_example_calculated_by_hand(checked: dict[str, Any]) -> None:
    up, down = checked["losses"]["up"], checked["losses"]["down"]
    # ratios 2 and 0.5, clipped to 1.28 and 0.8; the smaller gain counts, and a token that was not sampled does not
    assert up["loss"] == pytest.approx(-(1.28 + 0.5) / 2)
    assert down["loss"] == pytest.approx((2 + 0.8) / 2)
    assert up["gradient"] == pytest.approx([0, -0.5 / 2, 0])
    assert down["gradient"] == pytest.approx([2 / 2, 0, 0])


def test_padding_changes_no_log_probability(checked: dict[str, Any]) -> None:
    assert checked["padding"] < 1e-5


def test_learner_continues_from_its_checkpoint(checked: dict[str, Any]) -> None:
    result = checked["checkpoint"]
    assert result.pop("files") == ["checkpoint.pt", "policy"]
    assert all(result.values()), result


def test_teacher_is_right_once_in_four_and_its_turns_are_cloned(checked: dict[str, Any]) -> None:
    result = checked["cloning"]
    assert result["hops"]["0"] == result["hops"]["4"] == 0
    assert 60 < result["hops"]["2"] < 140
    assert 110 < result["hops"]["1"] < 190
    call = re.escape('<tool_call>{"name": "bash", "arguments": {"command": "cat ') + '[abc]"}}</tool_call>'
    assert re.fullmatch(rf"({call}<\|im_end\|>){{1,3}}answer [bcd]<\|im_end\|>", result["said"])
    assert result["begins"]
    assert result["n_tokens"] == 270
