"""OpenRLHF makes its experience from the farm's rollouts, and gives a broken rollout no advantage."""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Program


def test_openrlhf_makes_its_experience_from_the_farms_rows(run: Program) -> None:
    facts = run("openrlhf_rows")
    scored = facts["rewards"][:4] + facts["rewards"][8:]
    assert set(scored) <= {0.0, 1.0}
    assert facts["trained_tokens"][4:8] == [1] * 4, "a row without a trained token makes OpenRLHF's means NaN"
    assert min(facts["trained_tokens"][:4]) > 1
    assert facts["shapes"][0] == facts["shapes"][1]
    assert facts["off_mask"] == 0.0
    for estimator, advantages in facts["advantages"].items():
        assert advantages[4:8] == pytest.approx([0.0] * 4, abs=1e-5), estimator
    for group in (facts["rewards"][:4], facts["rewards"][8:]):
        start = 0 if group == facts["rewards"][:4] else 8
        mean = sum(group) / 4
        assert facts["advantages"]["dr_grpo"][start : start + 4] == pytest.approx([each - mean for each in group])
    assert facts["constructed"] == [3, 2, 3, 1, 1, 2, 2, 3072, 1]
    assert facts["kept"] == ["prompt 0"] * 4 + ["prompt 2"] * 4, "its filter drops the entirely broken group"
    assert facts["too_long"] == "max_len"
    assert facts["bounded"] == [2, True], "a rollout ends where OpenRLHF's row is full"
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.1, "min_tokens": 1, "max_tokens": 64}
    assert drawn.items() <= facts["asked"].items()
