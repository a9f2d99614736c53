"""Job scripts and pools: the printed script is the submitted one, and mistakes are named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farm.configuration.config_file import VARIABLE
from farm.errors import InvalidRequest, NotFound
from farm.launch.slurm_pool import (
    HEAD,
    SlurmPool,
    checked,
    job_keys,
    job_script,
    keys_path,
    pools_of_file,
    store_pools,
    stored_pools,
)
from farm.settings import settings

FOLDER = Path("/shared/a farm")


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_script_has_the_options_of_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_TICK_S", "1")
    monkeypatch.setenv("FARM_API_KEY", "a secret")
    more = {"partition": "cpu", "account": "me", "mem": "2G", "setup": "module load apptainer", "time": "1-00:00:00"}
    pool = SlurmPool(cpus=4, sbatch=("--constraint=ssd",), **more)  # type: ignore[arg-type]
    text = job_script(FOLDER, "ab12", "node", pool, 30)
    for option in (
        *("--job-name=farm-ab12-node", "--cpus-per-task=4", "--mem=2G", "--time=1-00:00:00", "--partition=cpu"),
        *("--account=me", "--signal=TERM@60", "--requeue", "--constraint=ssd", "--export=NONE"),
        "--output=/shared/a farm/logs/%x-%A_%a-%N.log",
    ):
        assert option in options(text)
    assert "export FARM_TICK_S=1" in text
    assert "a secret" not in text
    assert text.index("export PATH") < text.index("module load apptainer") < text.index("exec srun")
    # 2 GB are enough for 8 running rollouts, 4 CPUs would be for 32
    assert text.rstrip().endswith("node --at '/shared/a farm' --init 2 --run 8 --eval 4 --grace 15")
    (tmp_path / "a.sh").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "a.sh")], check=True)


def test_keys_are_passed_by_environment_and_only_to_their_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "FARM_STORE_URL": "postgresql://farm:of-site@db/farm",
        "FARM_API_KEY": "of-head",
        "FARM_POLICY_KEY": "of'engine",
        "FARM_POLICY_URL": "http://user:of-url@gpu/v1",
        "FARM_LEASE_S": "30",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for pool in ("node", HEAD):
        text = job_script(tmp_path, "ab12", pool, SlurmPool(), 30)
        assert not [each for each in ("of-site", "of-head", "of'engine", "of-url") if each in text]
        assert "export FARM_LEASE_S=30" in text
        own = keys_path(tmp_path, pool)
        own.parent.mkdir(exist_ok=True)
        own.write_text(job_keys(pool))
        shown = text.partition("exec srun")[0] + "env\n"
        env = subprocess.run(
            ["bash", "-c", shown], env={}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        has = {name for name, value in given.items() if f"{name}={value}" in env}
        assert has == (given.keys() if pool == HEAD else given.keys() - {"FARM_STORE_URL", "FARM_API_KEY"})


@pytest.mark.parametrize(("kill_wait_s", "grace_s"), [(30, 15), (600, 15), (20, 5), (2, 0)])
def test_grace_period_fits_into_slurms_kill_wait(kill_wait_s: int, grace_s: int) -> None:
    assert f"--grace {grace_s}\n" in job_script(FOLDER, "ab12", "node", SlurmPool(), kill_wait_s)


def test_head_is_a_job_that_waits_while_another_head_runs() -> None:
    assert job_script(FOLDER, "ab12", HEAD, SlurmPool(), 30).rstrip().endswith("head --dir '/shared/a farm' --standby")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"cpu": {"cpus": 0}}, "slurm.cpu.cpus"),
        ({"cpu": {"partitoin": "x"}}, "slurm.cpu.partitoin"),
        ({"cpu": {"min": 3, "max": 2}}, "max is 2, less than min, 3"),
        ({"cpu": {"time": "4h"}}, "slurm.cpu.time"),
        ({"cpu": {"mem": "lots"}}, "slurm.cpu.mem"),
        ({"cpu": {"partition": "a b"}}, "slurm.cpu.partition"),
        ({"cpu": {"sbatch": ["--x\n#SBATCH --y"]}}, "slurm.cpu.sbatch.0"),
        ({"cp-u": {}}, "slurm.cp-u"),
        ({"cpu": 3}, "slurm.cpu"),
        ([], "slurm"),
    ],
)
def test_wrong_pool_is_refused_by_name(table: object, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        checked(table, "slurm")


def test_pools_are_read_from_farm_toml_and_are_not_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "farm.toml"
    file.write_text('tick_s = 2.0\n[slurm.cpu]\npartition = "cpu"\nmax = 8\n[slurm.big]\ncpus = 64\n')
    monkeypatch.setenv(VARIABLE, str(file))
    settings.cache_clear()
    try:
        assert settings().tick_s == 2.0
        pools = pools_of_file()
    finally:
        settings.cache_clear()
    assert {name: (pool.partition, pool.max, pool.cpus) for name, pool in pools.items()} == {
        "cpu": ("cpu", 8, 4),
        "big": ("", 1, 64),
    }
    with pytest.raises(NotFound, match="farm slurm up"):
        stored_pools(tmp_path)
    store_pools(tmp_path, pools)
    assert stored_pools(tmp_path) == pools
