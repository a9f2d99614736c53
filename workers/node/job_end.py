"""The end of the Slurm job that a node runs in. The node announces it, and no longer work is placed there."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

from farm.errors import FarmError
from farm.launch.slurm_commands import job_left_s
from farm.launch.slurm_pool import SIGNAL_S

log = logging.getLogger("workers.node")


class JobEnd:
    """The time limit of this process's job, queried once; None outside of a job or without a limit."""

    def __init__(self) -> None:
        self._job_id = os.environ.get("SLURM_JOB_ID", "")
        self._end = math.inf
        if self._job_id:
            try:
                self._end = time.monotonic() + job_left_s(self._job_id)
            except FarmError as error:
                log.warning("End time of job %s is unknown: %s", self._job_id, error)

    def about(self) -> dict[str, Any]:
        """Return what a node announces of its job: its id, and the seconds until its end signal."""
        if not self._job_id:
            return {}
        left_s = self._end - time.monotonic() - SIGNAL_S
        return {"slurm_job": self._job_id} | ({"job_left_s": max(0.0, left_s)} if math.isfinite(left_s) else {})
