"""One job of several nodes with the same command on each: the first to run is the head, too."""

from __future__ import annotations

import sys
from pathlib import Path

import farm
from tests.acceptance.test_head import env_of, head, leads, log_of
from tests.services.farms import farm_folder, left_of, until
from tests.services.servers.slurm_cluster import SlurmCluster

FOR_EVER = {"data_source": "noop", "fields": {"seconds": 600.0}}


def handed_back(folder: Path, batch_id: str) -> None:
    """Check that all rollouts wait for the next node, and nothing counts against them."""
    with head(folder, "next") as after:
        until(lambda: leads(folder, after), lambda: f"there is a head: {log_of(folder, 'next')}", 600)
        with farm.connect(folder / "shared") as client:
            left = client.rollouts(batch_id)
            client.cancel(batch_id)
    assert {(each.state, each.node, each.n_failures, each.n_lost) for each in left} == {(farm.State.QUEUED, None, 0, 0)}
    assert left_of(folder) == []


def test_same_command_on_two_nodes_of_a_job_and_scancel(cluster: SlurmCluster) -> None:
    with farm_folder() as folder:
        line = f"{sys.executable} -m farm.cli.main node --at {folder / 'shared'} --head-on-first"
        script = folder / "job.sh"
        kept = {name: value for name, value in env_of(folder).items() if name.startswith(("FARM_", "PYTHONPATH"))}
        exports = "\n".join(f"export {name}='{value}'" for name, value in kept.items())
        options = "#SBATCH --nodes=2 --ntasks-per-node=1 --time=20\n#SBATCH --output=" + str(folder / "job.log")
        slots = "--init 2 --run 2 --eval 2 --grace 5"
        script.write_text(f"#!/bin/bash\n{options}\n{exports}\nexec srun --kill-on-bad-exit=0 {line} {slots}\n")
        job = cluster.output_of("sbatch", "--parsable", str(script))
        try:
            until(lambda: log_of(folder, "job").count(" is ready:") == 2, lambda: log_of(folder, "job"), 600)
            with farm.connect(folder / "shared") as client:
                batch_id = client.submit({"instances": [FOR_EVER] * 4})
                until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] == 4, "they run", 600)
                assert len({each.node for each in client.rollouts(batch_id)}) == 2
        finally:
            cluster.output_of("scancel", job)
        until(
            lambda: not cluster.output_of("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").startswith("COMPL"),
            "",
            600,
        )
        until(lambda: left_of(folder) == [], lambda: f"nothing is left: {left_of(folder)}", 600)
        handed_back(folder, batch_id)
