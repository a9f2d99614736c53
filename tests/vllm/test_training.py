"""Short training runs through a whole farm with a real vLLM, as in `make train`, also with a killed trainer."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farm
from examples.training.__main__ import train
from examples.training.training_farm import TrainingFarm, cloned_policy, training_farm
from examples.training.turn_text import CONTEXT_TOKENS
from examples.training.vllm_server import vllm_server
from farm.records.rollout import Rollout
from farm.settings import Settings
from tests.conftest import absent
from tests.services.farms import farm_folder
from tests.vllm.server import metric

STEPS, GROUPS, SAMPLES = 4, 4, 4
MAX_GAP = 1e-4


@dataclass(frozen=True)
class TrainingBench:
    """A farm, its engine, and the initial policy of runs."""

    python: Path
    engine_url: str
    policy: Path
    here: TrainingFarm

    def n_requests(self) -> int:
        """Return the number of requests that the engine has answered."""
        return int(metric(self.engine_url, "vllm:request_success_total"))


@dataclass(frozen=True)
class FinishedRun:
    """The curve of a run, and the rollouts of its batches, step by step, with their rows."""

    curve: list[dict[str, float]]
    steps: list[list[Rollout]]
    folder: Path
    n_killed: int
    n_requests: int
    n_calls: int


@pytest.fixture(scope="module")
def bench(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingBench]:
    folder = tmp_path_factory.mktemp("training")
    policy = cloned_policy(vllm_python, folder / "policy", "--updates", 200, "--batch", 48)
    with (
        farm_folder() as place,
        vllm_server(vllm_python, policy, CONTEXT_TOKENS, folder / "vllm.log") as engine_url,
        training_farm(Settings(home=place / "home", scratch=place / "scratch"), engine_url) as here,
    ):
        yield TrainingBench(vllm_python, engine_url, policy, here)


def finished(
    bench: TrainingBench, folder: Path, mode: str, n_kills: int = 0, trl_python: Path | None = None
) -> FinishedRun:
    """Train a run to its end, with TRL if its Python is given, and read its results."""
    trainer = "plain" if trl_python is None else "trl"
    options: dict[str, Any] = {"python": bench.python, "steps": STEPS, "mode": mode, "groups": GROUPS}
    options |= {"samples": SAMPLES, "sandbox": "namespace", "seed": 3, "kills": n_kills, "kill_within_s": 25.0}
    options |= {"trainer": trainer, "trainer_python": trl_python}
    before = bench.n_requests()
    n_killed = train(Namespace(**options), folder, bench.policy, bench.here)
    n_requests = bench.n_requests() - before
    with (folder / "curve.csv").open() as file:
        curve = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    with farm.connect(bench.here.home) as client:
        batch_ids = list(reversed(client.recent(1000)))[-STEPS:]
        assert len(client.recent(1000)) % STEPS == 0, "a step was submitted twice"
        assert [client.violations(batch_id) for batch_id in batch_ids] == [[]] * STEPS
        steps = [client.collect(batch_id, timeout_s=60) for batch_id in batch_ids]
        n_calls = sum(len(client.calls(rollout.rollout_id)) for step in steps for rollout in step)
    return FinishedRun(curve, steps, folder, n_killed, n_requests, n_calls)


def check_curve(run: FinishedRun) -> None:
    """Check that every step exists once, no rollout was lost, and the engine sampled with the trainer's weights."""
    assert [row["step"] for row in run.curve] == list(range(1, STEPS + 1))
    assert {row["n_rollouts"] for row in run.curve} == {GROUPS * SAMPLES}
    assert {row["n_unscored"] for row in run.curve} == {0}
    assert all(row["n_tokens"] > GROUPS * SAMPLES for row in run.curve)
    assert max(row["largest_gap"] for row in run.curve) <= MAX_GAP
    for row, step in zip(run.curve, run.steps, strict=True):
        assert all(rollout.trainable for rollout in step)
        rewards = [rollout.reward for rollout in step if rollout.reward is not None]
        assert row["reward"] == pytest.approx(sum(rewards) / len(step))
    assert any(0 < row["reward"] < 1 for row in run.curve), "nothing was learned, so the versions do not differ"
    assert (run.folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def versions(rollouts: list[Rollout]) -> set[int]:
    """Return the weights that sampled the tokens of these rollouts."""
    rows = [row for rollout in rollouts for row in rollout.segments]
    return {version for row in rows for version in row.policy_versions[row.response_mask == 1].tolist()}


def test_run_trains_on_tokens_sampled_by_its_own_weights(bench: TrainingBench, tmp_path: Path) -> None:
    run = finished(bench, tmp_path / "sync", "sync")
    check_curve(run)
    assert [versions(step) for step in run.steps] == [{step} for step in range(STEPS)]
    assert run.n_requests == run.n_calls
    with farm.connect(bench.here.home) as client:
        assert client.newest_version() == str(STEPS)


def test_one_step_off_policy_is_at_most_one_version_old(bench: TrainingBench, tmp_path: Path) -> None:
    run = finished(bench, tmp_path / "off-policy", "off-policy")
    check_curve(run)
    for number, step in enumerate(run.steps, start=1):
        assert versions(step) <= {max(0, number - 2), number - 1}
    assert any(row["off_policy_share"] > 0 for row in run.curve)
    assert run.curve[0]["off_policy_share"] == 0


@pytest.mark.parametrize("n_kills", [0, 3])
def test_trl_trains_on_the_farms_rollouts_and_repeats_none(bench: TrainingBench, tmp_path: Path, n_kills: int) -> None:
    python = os.environ.get("FARM_TRAINERS_PYTHON", "")
    if not python:
        absent("TRL is in the environment of `make test-trainers`, which is not there (FARM_TRAINERS_PYTHON)")
    run = finished(bench, tmp_path / f"trl-{n_kills}", "sync", n_kills, Path(python))
    check_curve(run)
    assert (run.n_killed > 0) == (n_kills > 0)
    assert [versions(step) for step in run.steps] == [{step} for step in range(STEPS)]
    assert {rollout.attempt for step in run.steps for rollout in step} == {1}
    assert run.n_requests == run.n_calls


@pytest.mark.parametrize("mode", ["sync", "off-policy"])
def test_killed_trainer_continues_and_repeats_no_rollout(bench: TrainingBench, tmp_path: Path, mode: str) -> None:
    run = finished(bench, tmp_path / f"killed-{mode}", mode, n_kills=3)
    check_curve(run)
    assert run.n_killed
    assert {rollout.attempt for step in run.steps for rollout in step} == {1}
    assert run.n_requests == run.n_calls
