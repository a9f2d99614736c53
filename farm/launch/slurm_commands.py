"""The commands of Slurm that the farm uses: sbatch, squeue, scancel, scontrol."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.errors import NotAllowed, ServiceError

_TIMEOUT_S = 60.0
_FORMAT = "%A|%F|%i|%T|%L|%P|%N|%j|%r"
_ENDED = {"COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
_FOR_JOB = ("SLURM_", "SBATCH_", "SRUN_", "SLURMD_", "PMI")
"""Beginnings of variables that a job has, and that would say what a job submitted from it is like."""
_KILL_WAIT_S = 30


class SlurmFailed(ServiceError):
    """A command of Slurm failed; the message has what it said."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as squeue shows it; `left_s` until its time limit.

    `job_id` is what it knows itself by. Others name it by its `place`, `ARRAY_N`: the id of one of an array's jobs is
    also that of the array, and by the other ids nothing can be cancelled.
    """

    job_id: str
    array_id: str
    place: str
    state: str
    left_s: float
    partition: str
    nodes: str
    name: str
    reason: str

    @property
    def pending(self) -> bool:
        """True if it has not begun, or has been requeued."""
        return self.state in {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}

    @property
    def ended(self) -> bool:
        """True if only its clean-up is left."""
        return self.state in _ENDED


def has_slurm() -> bool:
    """Return whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def submit(script: Path, n: int, after: str = "") -> str:
    """Submit an array of `n` jobs, each of which starts when there is room for it. Returns the array's id.

    None starts before the first of the array `after`.
    """
    more = (f"--dependency=after:{after}_1",) if after else ()
    return _said("sbatch", "--parsable", f"--array=1-{n}", *more, str(script)).strip().partition(";")[0]


def jobs_named(names: Sequence[str]) -> list[SlurmJob]:
    """Return the jobs of this user with these names that have not ended."""
    text = _said("squeue", "--noheader", "--array", "--me", f"--name={','.join(names)}", f"--format={_FORMAT}")
    return [job for line in text.splitlines() if line.strip() and not (job := _job(line)).ended]


def any_left(names: Sequence[str]) -> bool:
    """Return whether jobs with these names are still there, be it that they end."""
    return bool(_said("squeue", "--noheader", "--array", "--me", f"--name={','.join(names)}", "--format=%A").strip())


def array_place(job_id: str) -> str:
    """Return the `ARRAY_PLACE` of a job, as its log is named; of one that has ended, as Slurm still knows it."""
    # by the id of an array all its jobs are shown
    own = rf"^JobId={re.escape(job_id)} ArrayJobId=(\d+) ArrayTaskId=(\d+)"
    said = re.search(own, _said("scontrol", "show", "job", job_id), re.MULTILINE)
    return f"{said[1]}_{said[2]}" if said else job_id


def cancel(jobs: Sequence[SlurmJob]) -> None:
    """Cancel jobs; those that have ended are none of its concern."""
    if jobs:
        _said("scancel", "--quiet", *(job.place for job in jobs))


def job_left_s(job_id: str) -> float:
    """Return the seconds until a job's time limit; infinite if it has none."""
    text = _said("squeue", "--noheader", "--array", f"--jobs={job_id}", "--format=%A|%L")
    # by the id of an array all its jobs are shown
    left = dict(line.strip().split("|", 1) for line in text.splitlines() if "|" in line)
    return seconds(left.get(job_id, ""))


def kill_wait_s() -> int:
    """Return the seconds between the SIGTERM and the SIGKILL of a job that is to end."""
    said = re.search(r"^KillWait\s*=\s*(\d+)", _said("scontrol", "show", "config"), re.MULTILINE)
    return int(said[1]) if said else _KILL_WAIT_S


def seconds(text: str) -> float:
    """Return the seconds of a time as Slurm shows it, `D-HH:MM:SS`; infinite if it has no end or is not known."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip())
    if parts is None:
        return float("inf")
    days, hours, minutes, rest = (int(each or 0) for each in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _job(line: str) -> SlurmJob:
    job_id, array_id, place, state, left, partition, nodes, name, reason = line.strip().split("|", 8)
    return SlurmJob(job_id, array_id, place, state, seconds(left), partition, nodes, name, reason)


def _said(*words: str) -> str:
    """Return a command's output. Raises NotAllowed where there is no Slurm, SlurmFailed with what it said."""
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_FOR_JOB)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise NotAllowed(f"there is no {words[0]} on PATH: this machine does not submit to a Slurm") from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{words[0]} did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = " ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise SlurmFailed(said[:500] or f"{words[0]} ended with status {done.returncode}")
    return done.stdout
