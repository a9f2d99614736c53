"""The name and folder of a node, unique among the nodes of its farm on this machine."""

from __future__ import annotations

import os
from typing import IO

from farm.embedded.node_folder import locked, own_folder
from farm.errors import Conflict
from farm.settings import Settings, choose, settings


def own_settings() -> tuple[Settings, IO[str]]:
    """Return the settings and the lock of a node, with its own scratch folder, so it never sweeps another farm's.

    If the name comes from Slurm and is taken on this machine, the job's id is added, then that of the step and process.
    Raises Conflict if every name is taken.
    """
    shared = settings()
    names = [shared.node]
    if "FARM_NODE" not in os.environ and (job := os.environ.get("SLURM_JOB_ID")):
        step = f"{os.environ.get('SLURM_STEP_ID', '0')}.{os.environ.get('SLURM_PROCID', '0')}"
        names += [f"{shared.node}-{job}", f"{shared.node}-{job}.{step}"]
    for name in names:
        folder = own_folder(shared.scratch, name, shared.database_url)
        taken = f"node {name} runs on this machine already: set FARM_NODE to another name for this one"
        try:
            lock = locked(folder / "lock", taken)
        except Conflict:
            if name != names[-1]:
                continue
            raise
        return choose(scratch=folder, node=name), lock
    raise AssertionError("there is a name at least")
