"""Slurm commands: their output is parsed, and failures are one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from farm.errors import NotAllowed
from farm.launch import slurm_commands
from farm.launch.slurm_commands import SlurmFailed, seconds
from tests.unit.farm.launch.fake_slurm import FakeSlurm

LINES = (
    "1|1|1_1|RUNNING|19:12|cpu|n1|farm-x-head|None",
    "3|1|1_1|PENDING|20:00|cpu||farm-x-node|Resources",
    "4|4|4_1|COMPLETING|18:59|cpu|n3|farm-x-node|None",
    "5|5|5_1|PENDING|1-00:00:00|big||farm-x-node|BeginTime",
    "6|6|6_1|RUNNING|UNLIMITED|big|n[2-4]|farm-x-node|None",
    "7|7|7_1|PENDING|INVALID|big||farm-x-node|launch failed requeued held|or so",
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "lab", monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4:58", 298), ("58", 58), ("0:00", 0), ("1:02:03", 3723), ("2-00:00:01", 172_801), (" 10:00\n", 600)),
        *((name, math.inf) for name in ("UNLIMITED", "NOT_SET", "INVALID", "", "N/A", "-1")),
    ],
)
def test_times_are_parsed(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_jobs_are_parsed_without_ended_ones(slurm: FakeSlurm) -> None:
    (Path(slurm._lab) / "jobs").write_text("\n".join(LINES) + "\n\n")
    jobs = {job.job_id: job for job in slurm_commands.jobs_named(["farm-x-head", "farm-x-node"])}
    assert list(jobs) == ["1", "3", "5", "6", "7"]
    assert [job.job_id for job in jobs.values() if job.pending] == ["3", "5", "7"]
    assert (jobs["1"].left_s, jobs["5"].left_s, jobs["6"].left_s) == (1152, 86_400, math.inf)
    assert jobs["7"].reason == "launch failed requeued held|or so"


def test_job_is_submitted_without_slurm_variables_of_the_current_job(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SBATCH_PARTITION", "SLURMD_NODENAME", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    script = tmp_path / "a.sh"
    script.write_text("#SBATCH --job-name=farm-x-node\n")
    assert slurm_commands.submit(script, 3) == "1"
    assert len(slurm.jobs()) == 3
    assert [line for line in slurm.environment().splitlines() if "SLURM" in line or "SBATCH" in line] == [
        "SLURM_CONF=x"
    ]


def test_refusal_by_slurm_is_one_line_in_its_words(slurm: FakeSlurm, tmp_path: Path) -> None:
    stderr = "sbatch: error: invalid partition specified: nosuch\nsbatch: error: Batch job submission failed\n"
    slurm.refuse(stderr)
    with pytest.raises(SlurmFailed, match=r"^sbatch: error: invalid partition specified: nosuch sbatch: error: Batch"):
        slurm_commands.submit(tmp_path / "a.sh", 1)


def test_kill_wait_and_array_index_are_read(slurm: FakeSlurm) -> None:
    assert slurm_commands.kill_wait_s() == 30
    assert slurm_commands.array_element("3") == "1_2"
    assert slurm_commands.array_element("1") == "1_1", "its id is also that of the array"
    with pytest.raises(SlurmFailed, match="Invalid job id specified"):
        slurm_commands.array_element("99")


def test_missing_slurm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not slurm_commands.has_slurm()
    with pytest.raises(NotAllowed, match="there is no squeue on PATH"):
        slurm_commands.jobs_named(["x"])


def test_remaining_time_is_that_of_the_job_not_of_its_array(slurm: FakeSlurm) -> None:
    slurm.set_jobs("2|1|1_1|RUNNING|9:00|cpu|n1|a|None", "1|1|1_2|RUNNING|UNLIMITED|cpu|n2|a|None")
    assert slurm_commands.job_left_s("2") == 540
    slurm.set_jobs("1|1|1_1|RUNNING|8:00|cpu|n1|a|None", "2|1|1_2|RUNNING|9:00|cpu|n2|a|None")
    assert slurm_commands.job_left_s("1") == 480
    assert slurm_commands.job_left_s("7") == math.inf
