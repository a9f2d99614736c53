"""`farm eval` on a store: an interrupted evaluation resumes, and two of them are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from farm.cli.main import main
from farm.client.local import LocalFarm
from farm.errors import Conflict
from farm.evaluation import evaluate
from farm.notifications import Signals
from farm.store.database import Store
from testkit.scripted_rollouts import ScriptedRollouts

REWARDS: dict[str, Sequence[float | None]] = {"a": (1.0, 0.0), "b": (1.0, 1.0), "c": (0.0, None)}
"""By instance and sample: pass@1 is 1/2, 1 and 0, and avg@2 the same; pass@2 of `a` and `b`, which have two scores."""


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = [{"data_source": "algebra", "instance_id": name, "fields": {"x": name}} for name in REWARDS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def scripted(sqlite_store: Store) -> ScriptedRollouts:
    return ScriptedRollouts(
        sqlite_store, lambda rollout: REWARDS[rollout.instance_id][rollout.sample_index], ["algebra"]
    )


def farm_eval(store: Store, *words: object) -> Result:
    return CliRunner().invoke(main, ["eval", "--url", store.url, "-k", "2", *map(str, words)])


def test_interrupted_evaluation_continues(sqlite_store: Store, scripted: ScriptedRollouts, problems: Path) -> None:
    first = farm_eval(sqlite_store, problems, "--timeout", 0.01)
    assert first.exit_code == 1
    assert "0/6 ended" in first.stderr
    scripted.run_next(3)
    second = farm_eval(sqlite_store, problems, "--timeout", 0.01)
    assert "3 of 6 rollouts have ended" in second.stderr
    scripted.run_next()
    report_file = problems.parent / "report.json"
    last = farm_eval(sqlite_store, problems, "-o", report_file)
    assert last.exit_code == 0, last.stderr
    assert len(scripted.finished) == 6
    assert scripted.queued() == []
    assert "0.500 (0.000 to 1.000)" in last.stdout
    assert "1 rollouts without a score: sandbox_error" in last.stdout
    assert "1 instances have fewer than 2 scored samples" in last.stdout
    report = json.loads(report_file.read_text())
    (source,) = report["sources"].values()
    assert (source["average"]["value"], source["average"]["n"]) == (0.5, 3)
    assert [source["passed"][k]["value"] for k in ("1", "2")] == [0.5, 1.0]
    assert (source["passed"]["2"]["n"], source["n_short"], source["n_unscored"]) == (2, 1, 0)
    assert list(report["unscored"]) == ["sandbox_error"]


def test_evaluations_are_compared(sqlite_store: Store, scripted: ScriptedRollouts, problems: Path) -> None:
    def evaluated(name: str, *words: object) -> Result:
        farm_eval(sqlite_store, problems, "--name", name, "--timeout", 0.01)
        scripted.run_next()
        return farm_eval(sqlite_store, problems, "--name", name, "--json", *words)

    base_file = problems.parent / "base.json"
    base = json.loads(evaluated("base", "-o", base_file).stdout)
    before = dict(REWARDS)
    REWARDS.update(a=(1.0, 1.0), c=(1.0, 1.0))
    try:
        tuned = json.loads(evaluated("tuned", "--compare", base_file).stdout)
    finally:
        REWARDS.update(before)
    average = tuned["comparison"]["average"]["algebra"]
    # a: 1 - 1/2, b: 0, c: 1 - 0; two differ, both up, of 4 ways to flip them 2 are as far
    assert average["estimate"]["value"] == pytest.approx(0.5)
    assert (average["n_better"], average["n_worse"], average["p_value"]) == (2, 0, 0.5)
    again = farm_eval(sqlite_store, problems, "--name", "tuned", "--json", "--compare", base["batch_id"])
    assert json.loads(again.stdout)["comparison"]["average"] == tuned["comparison"]["average"]
    assert len(scripted.finished) == 12


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--name", "a name"), "name: must have 1 to 64 of"),
        (("--set", "n_sample=3"), "n_sample: Extra inputs"),
        (("--compare", "b0"), "there is no batch b0"),
        (("--compare", "problems.jsonl"), "problems.jsonl"),
        (("-k", "0"), "Invalid value for '-k'"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    sqlite_store: Store,
    scripted: ScriptedRollouts,
    problems: Path,
    words: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(problems.parent)
    result = farm_eval(sqlite_store, problems, *words)
    assert result.exit_code in (1, 2)
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert scripted.queued() == [] or "--compare" in words


def test_evaluation_from_python_is_idempotent_by_name(sqlite_store: Store, scripted: ScriptedRollouts) -> None:
    client = LocalFarm(sqlite_store, Signals(""), 1000)
    problem = {"data_source": "algebra", "instance_id": "b", "fields": {}}
    with pytest.raises(TimeoutError):
        evaluate(client, [problem], n_samples=2, name="step-1", timeout_s=0.0)
    scripted.run_next()
    report = evaluate(client, [problem], n_samples=2, name="step-1")
    assert report.sources["algebra"].average is not None
    assert report.sources["algebra"].average.value == 1.0
    with pytest.raises(Conflict):
        evaluate(client, [problem], n_samples=3, name="step-1")
    assert len(scripted.finished) == 2
