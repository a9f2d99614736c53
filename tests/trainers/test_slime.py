"""slime and miles accept the farm's samples: both functions that their options name, and their own checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import absent
from tests.trainers.conftest import Program, are_of


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_checks_of_slime_and_miles_accept_the_farms_samples(run: Program, trainers: Path, package: str) -> None:
    source = trainers / package
    if not (source / package).exists():
        absent(f"the source of {package} is not in {source}: tests/trainers/environment.sh could not fetch it")
    facts = run("slime_samples", package, path=source)
    assert facts["kind"] == f"{package}.rollout.base_types"
    assert facts["groups"] == [4, 4, 4]
    assert facts["removed"] == [False] * 4 + [True] * 4 + [False] * 4
    assert facts["status"][4:8] == ["failed"] * 4
    scored = facts["rewards"][:4] + facts["rewards"][8:]
    assert set(scored) <= {0.0, 1.0}
    assert facts["rewards"][4:8] == [sum(scored) / 8] * 4
    assert facts["normalized"][4:8] == [0.0] * 4
    assert facts["n_removed"] == 4
    assert facts["other_step"]
    assert facts["generated"] == {"batches": 2, "broken_is_neutral": True}
    assert facts["filtered"] == [True, False, False, False, True, True, True, True], "broken samples stay removed"
    assert facts["several"]["n"] == [1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert facts["several"]["first_group"] == [-0.125, 0.125, 0.125, 0.125]
    assert facts["refused"] == ["rollout_top_p", "partial_rollout", "rollout_max_context_len", "eval_function_path"]
    drawn = {"temperature": 0.0, "top_p": 0.7, "top_k": 20, "max_tokens": 48, "min_tokens": 1}
    assert drawn.items() <= facts["evaluated"].items(), "an evaluation samples with its own parameters"
    experts = facts["experts"]
    assert [are_of(of_ids, ids) for ids, of_ids in experts["rows"]] == [True] * 4 + [False] * 4 + [True] * 8
    assert all(len(ids) - 1 == len(of_ids) for ids, of_ids in experts["rows"])
    assert experts["types"] == ["int32"]
    assert experts["evaluated"] == [None] * 4
    dropped = {name.removeprefix("rollout/dynamic_filter/drop_") for name in facts["collected"].pop("dropped")}
    assert dropped <= {"refused", "too_few_scored", "stale"}
    assert facts["collected"] == {
        "sizes": [4, 4, 4, 4],
        "varied": True,
        "removed": 0,
        "again": True,
        "disjoint": True,
        "indices": list(range(8, 16)),
        "prompts": ["x"],
    }


def test_evaluation_loop_of_slime_samples_with_the_evaluations_parameters(
    run: Program, trainers: Path, model_text: Path
) -> None:
    source = trainers / "slime"
    if not (source / "slime").exists():
        absent(f"the source of slime is not in {source}: tests/trainers/environment.sh could not fetch it")
    facts = run("slime_evaluation", source, model_text, path=source)
    own = facts["default"].pop("own")
    assert (own["indices"], own["batches"]) == ([0, 1, 2, 3], 2)
    assert set(own["rewards"]) <= {0.0, 1.0}
    for drawn in own["sampling"]:
        assert {"temperature": 1.0, "top_p": 1.0, "top_k": -1}.items() <= drawn.items()
    given = {"temperature": 0.2, "top_p": 0.7, "top_k": 20, "max_tokens": 48, "min_tokens": 1, "stop": ["STOP"]}
    for drawn in facts["options"]["own"]["sampling"]:
        assert given.items() <= drawn.items()
    example = facts["example"]["aime"]
    assert len(example["rewards"]) == 2 * 16
    for drawn in example["sampling"]:
        assert {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 16_384}.items() <= drawn.items()
    first, second = facts["config"]["first"], facts["config"]["second"]
    assert (len(first["rewards"]), len(second["rewards"])) == (2, 6)
    for drawn in first["sampling"]:
        theirs = {"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1, "max_tokens": 33, "stop": ["END"]}
        assert theirs.items() <= drawn.items()
    for drawn in second["sampling"]:
        assert {"temperature": 0.3, "top_k": -1, "min_tokens": 2, "stop": ["END"]}.items() <= drawn.items()
    assert facts["refused"] == ["rm_type", "custom_rm_path", "apply_chat_template_kwargs"]
