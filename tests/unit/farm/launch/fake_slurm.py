"""Fakes of sbatch, squeue, scancel and scontrol on PATH, which keep a list of jobs and start none.

`make test-slurm` has the real ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PROGRAMS = {
    # prints `2` like --parsable; a task is a line of the file `jobs`, like squeue --array shows it
    "sbatch": """
[ ! -e "$LAB/refuses" ] || { cat "$LAB/refuses" >&2; exit 1; }
for last; do :; done
name=$(sed -n 's/^#SBATCH --job-name=//p' "$last")
n=$(printf '%s' "$*" | sed -n 's/.*--array=1-\\([0-9]*\\).*/\\1/p')
first=$(($(cat "$LAB/last") + 1))
[ ! -e "$LAB/lost" ] || { echo "$first"; exit 0; }
for i in $(seq "$n"); do
  echo "$((first + i - 1))|$first|${first}_$i|PENDING|20:00|cpu||$name|Resources" >>"$LAB/jobs"
done
echo $((first + n - 1)) >"$LAB/last"
env >"$LAB/environment"
echo "$first"
""",
    "squeue": """
case "$*" in
  *--jobs=*) of=$(printf '%s' "$*" | sed -n 's/.*--jobs=\\([^ ]*\\).*/\\1/p')
    awk -F'|' -v of="$of" '$1 == of || $2 == of { print $1 "|" $5 }' "$LAB/jobs"; exit 0;;
esac
names=$(printf '%s' "$*" | sed -n 's/.*--name=\\([^ ]*\\).*/\\1/p' | tr , '|')
grep -E "\\|($names)\\|" "$LAB/jobs" || true
""",
    "scancel": """
for id; do
  case $id in -*) ;; *_*) sed -i "/|$id|/d" "$LAB/jobs"; echo "$id" >>"$LAB/cancelled";; esac
done
""",
    "scontrol": """
case "$*" in
  "show config") printf 'KeepAliveTime = SYSTEM_DEFAULT\\nKillWait                = 30 sec\\n';;
  "show job 3") echo "JobId=3 ArrayJobId=1 ArrayTaskId=2 JobName=farm-x";;
  "show job 1") printf 'JobId=3 ArrayJobId=1 ArrayTaskId=2\n\nJobId=1 ArrayJobId=1 ArrayTaskId=1\n';;
  *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
""",
}


class FakeSlurm:
    """Its jobs are lines of a file, which tests change as Slurm would."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lab = folder
        (folder / "bin").mkdir(parents=True)
        for name, text in _PROGRAMS.items():
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\nLAB={folder}\n{text}")
            program.chmod(0o755)
        (folder / "last").write_text("0")
        self.set_jobs()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def set_jobs(self, *lines: str) -> None:
        (self._lab / "jobs").write_text("".join(f"{line}\n" for line in lines))

    def jobs(self) -> list[str]:
        return (self._lab / "jobs").read_text().split()

    def run_all(self, left: str = "3:00:00") -> None:
        """Start all pending jobs."""
        lines = [line.replace("|PENDING|", "|RUNNING|").replace("|20:00|", f"|{left}|") for line in self.jobs()]
        self.set_jobs(*lines)

    def refuse(self, why: str) -> None:
        (self._lab / "refuses").write_text(why)

    def lose(self) -> None:
        """Make submitted jobs end at once."""
        (self._lab / "lost").write_text("")

    def accept(self) -> None:
        (self._lab / "refuses").unlink()

    def environment(self) -> str:
        return (self._lab / "environment").read_text()
