"""SkyRL accepts the farm's generator output: its own validation, tensors and advantages, plain and step-wise."""

from __future__ import annotations

from tests.trainers.conftest import Program, are_of


def test_skyrl_accepts_the_farms_rows(run: Program) -> None:
    facts = run("skyrl_rows")
    # rollouts of every kind, plain and step-wise, and faults that those checks find
    assert facts["constructed"] == {"rows": 12, "steps": 14, "broken": 0.0}
    assert facts["refused"] == ["loss_masks", "is_last_step", "trajectory_ids"]
    experts = facts["experts"]
    assert experts["refused"] == ["expert_form", "inference_engine.enable_return_routed_experts"]
    assert all(are_of(of_ids, ids) for ids, of_ids in experts["rows"][:4])
    assert all(are_of(of_ids[:-1], ids) for ids, of_ids in experts["tensor"][:4]), "SkyRL's own tensor of them"
    assert [each for _, of_ids in experts["rows"][4:] for each in of_ids] == [[[0, 1, 2, 3]] * 2] * (
        sum(len(ids) - 1 for ids, _ in experts["rows"][4:])
    )
    assert experts["evaluated"] is None
    for kind in ("plain", "step_wise"):
        training = facts[kind]
        assert training["rows"] == 12
        assert training["masked"] == [False] * 4 + [True] * 4 + [False] * 4
        scored = training["rewards"][:4] + training["rewards"][8:]
        assert set(scored) <= {0.0, 1.0}
        mean = sum(scored) / len(scored)
        assert training["rewards"][4:8] == [mean] * 4, "an entirely broken group does not change the mean of the step"
        assert (training["scored_mean"], training["n_unscored"]) == (mean, 4)
        assert training["advantages_of_broken"] == [0.0] * 4
        assert training["stop_reasons"] == ["error", "stop"]
        drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 1, "max_tokens": 64}
        assert drawn.items() <= training["asked"].items(), "as in SkyRL's own default configuration"
        assert training["same_when_again"], "the same step is the same batch"
