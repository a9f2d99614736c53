"""The Slurm commands used by the farm: sbatch, squeue, scancel, scontrol."""

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
"""Prefixes of variables of a job that would affect jobs submitted from it."""
_KILL_WAIT_S = 30


class SlurmFailed(ServiceError):
    """A Slurm command failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as squeue shows it; `left_s` is the time until its limit.

    `job_id` is the id that the job itself sees. Others refer to it by its `array_element`, `ARRAY_N`: the id of one job
    of an array is also the array's, and the other ids cannot be cancelled.
    """

    job_id: str
    array_id: str
    array_element: str
    state: str
    left_s: float
    partition: str
    nodes: str
    name: str
    reason: str

    @property
    def pending(self) -> bool:
        """True if it has not started, or has been requeued."""
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

    None starts before the first job of the array `after`.
    """
    more = (f"--dependency=after:{after}_1",) if after else ()
    return _output("sbatch", "--parsable", f"--array=1-{n}", *more, str(script)).strip().partition(";")[0]


def jobs_named(names: Sequence[str]) -> list[SlurmJob]:
    """Return this user's unfinished jobs with these names."""
    text = _output("squeue", "--noheader", "--array", "--me", f"--name={','.join(names)}", f"--format={_FORMAT}")
    return [job for line in text.splitlines() if line.strip() and not (job := _job(line)).ended]


def any_left(names: Sequence[str]) -> bool:
    """Return whether jobs with these names still exist, including ones that are ending."""
    return bool(_output("squeue", "--noheader", "--array", "--me", f"--name={','.join(names)}", "--format=%A").strip())


def array_element(job_id: str) -> str:
    """Return the `ARRAY_N` of a job, as in its log's name; for an ended job, while Slurm remembers it."""
    # the id of an array shows all its jobs
    own = rf"^JobId={re.escape(job_id)} ArrayJobId=(\d+) ArrayTaskId=(\d+)"
    match = re.search(own, _output("scontrol", "show", "job", job_id), re.MULTILINE)
    return f"{match[1]}_{match[2]}" if match else job_id


def cancel(jobs: Sequence[SlurmJob]) -> None:
    """Cancel jobs; ended ones are ignored."""
    if jobs:
        _output("scancel", "--quiet", *(job.array_element for job in jobs))


def job_left_s(job_id: str) -> float:
    """Return the seconds until a job's time limit; infinite if it has none."""
    text = _output("squeue", "--noheader", "--array", f"--jobs={job_id}", "--format=%A|%L")
    # the id of an array shows all its jobs
    left = dict(line.strip().split("|", 1) for line in text.splitlines() if "|" in line)
    return seconds(left.get(job_id, ""))


def kill_wait_s() -> int:
    """Return the seconds between SIGTERM and SIGKILL when Slurm ends a job."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", _output("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else _KILL_WAIT_S


def seconds(text: str) -> float:
    """Return the seconds of a time in Slurm's format, `D-HH:MM:SS`; infinite if unlimited or unknown."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip())
    if parts is None:
        return float("inf")
    days, hours, minutes, rest = (int(each or 0) for each in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _job(line: str) -> SlurmJob:
    job_id, array_id, array_element, state, left, partition, nodes, name, reason = line.strip().split("|", 8)
    return SlurmJob(job_id, array_id, array_element, state, seconds(left), partition, nodes, name, reason)


def _output(*words: str) -> str:
    """Return a command's output. Raises NotAllowed without Slurm, SlurmFailed with its error output."""
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(_FOR_JOB)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise NotAllowed(f"there is no {words[0]} on PATH: this machine cannot submit Slurm jobs") from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{words[0]} did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        stderr = " ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise SlurmFailed(stderr[:500] or f"{words[0]} ended with status {done.returncode}")
    return done.stdout
