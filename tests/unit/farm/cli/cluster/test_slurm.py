"""`farm slurm` on a fake Slurm: impossible requests are refused, and a second `up` removes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.cli.cluster.slurm import slurm
from farm.embedded.node_folder import locked
from farm.launch.head_claim import HeadClaim
from farm.launch.shared_address import SharedAddress, write_address
from farm.launch.slurm_pool import stored_pools
from tests.services.commands import output_of
from tests.unit.farm.launch.fake_slurm import FakeSlurm


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("FARM_HOME", str(tmp_path / "shared"))
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "lab", monkeypatch)


def jobs(lab: FakeSlurm) -> list[str]:
    return [line.split("|")[7].rpartition("-")[2] for line in lab.jobs()]


def up(*words: str) -> str:
    return output_of(slurm, "up", "--no-wait", *words)


def test_without_a_running_head_no_jobs_are_submitted(lab: FakeSlurm, tmp_path: Path) -> None:
    output = output_of(slurm, "up", "--no-head", code=1)
    assert f"no head runs in {tmp_path / 'shared'} to maintain the jobs" in output
    assert lab.jobs() == []
    assert not (tmp_path / "shared" / "slurm.json").exists()
    claim = HeadClaim(tmp_path / "shared", beat_s=0.05)
    assert claim.acquire(False, lambda: True)
    try:
        up("--no-head")
        assert list(stored_pools(tmp_path / "shared")) == ["node"]
        assert lab.jobs() == []
    finally:
        claim.release()
    # the running head has ended
    assert "no head runs in" in output_of(slurm, "up", "--no-head", code=1)


def test_wait_stops_if_the_head_ends_before_it_is_ready(lab: FakeSlurm) -> None:
    up()
    lab.set_jobs()
    lab.refuse("sbatch: error: Invalid account")
    assert "sbatch: error: Invalid account" in output_of(slurm, "up", code=1)
    lab.accept()
    lab.lose()
    assert "the head's job ended before it was ready: see `farm slurm logs head" in output_of(slurm, "up", code=1)


def test_second_up_keeps_the_head_and_ends_omitted_pools(lab: FakeSlurm, tmp_path: Path) -> None:
    up("--max", "3")
    assert jobs(lab) == ["head", "head", "node"]
    (tmp_path / "farm.toml").write_text("[slurm.big]\nmax = 2\n")
    up()
    assert jobs(lab) == ["head", "head", "node"], "the submitted jobs are enough"
    pools = {name: (pool.min, pool.max) for name, pool in stored_pools(tmp_path / "shared").items()}
    assert pools == {"head": (2, 2), "big": (1, 2), "node": (0, 0)}
    output_of(slurm, "down")
    assert lab.jobs() == []
    assert {pool.max for pool in stored_pools(tmp_path / "shared").values()} == {0}


def test_logs_are_found_by_job_and_machine_without_a_head(lab: FakeSlurm, tmp_path: Path) -> None:
    up()
    for name in ("farm-ab12cd34-node-1_2-n1.log", "farm-ab12cd34-node-4_1-n7.log", "farm-ab12cd34-head-9_1-n7.log"):
        (tmp_path / "shared" / "logs" / name).write_text(f"{name}\n")
    assert "node-4_1" in output_of(slurm, "logs", "4_1")
    assert "node-1_2" in output_of(slurm, "logs", "n1")
    assert "node-1_2" in output_of(slurm, "logs", "3"), "the id of an array's job"
    assert "head-9_1" in output_of(slurm, "logs", "head")
    assert "there is no log of n2 in" in output_of(slurm, "logs", "n2", code=1)


def test_two_concurrent_ups_submit_one_head(lab: FakeSlurm, tmp_path: Path) -> None:
    with locked(tmp_path / "shared" / "slurm" / "lock", ""):
        assert "another `farm slurm up` is running" in output_of(slurm, "up", "--no-wait", code=1)
    assert lab.jobs() == []
    up()
    assert jobs(lab) == ["head", "head", "node"]


def test_up_without_nodes_waits_only_for_the_head(lab: FakeSlurm, tmp_path: Path) -> None:
    up("--min", "0", "--max", "4")
    assert jobs(lab) == ["head", "head"]
    write_address(tmp_path / "shared", SharedAddress("ab12", api_url="http://h:1", head="one", store_url="sqlite://"))
    assert "ready; clients: --url" in output_of(slurm, "up", "--min", "0", "--max", "4")
