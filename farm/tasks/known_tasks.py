"""Evidence and findings of tasks, which `farm tasks check` and `attack` store in FARM_HOME by a task's digest.

`home` is the path of FARM_HOME.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.home import own_home, write_own
from farm.records.request import Instance

ATTACKS = "task_attacks"
"""The folder of reports: `DIGEST.PLAN.json`, by `Instance.digest` and the digest of the attack plan."""
CHECKS = "task_checks"
"""The folder of checks, by the digest of a task's files: `DIGEST.json` is its evidence, `DIGEST.log` the last output,
`DIGEST.KEY.json` a result, by its other inputs."""
FINDINGS = ("vacuous", "flaky", "skippable", "hackable", "unsolvable")
_N_NAMED = 5
"""Instances listed in a line of findings."""


def kept_in(home: Path, folder: str) -> Path:
    """Return a folder of FARM_HOME, which may not exist."""
    return home.absolute() / folder


def keep_text(home: Path, folder: str, name: str, text: str) -> Path:
    """Write a file into such a folder, for its owner only; return its path. Raises NotAllowed, OSError."""
    own_home(home)
    path = kept_in(home, folder) / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_own(path, text)
    return path


@dataclass(frozen=True, slots=True)
class TaskEvidence:
    """Facts that a task's solution showed in a check, which allow stricter verification.

    `footprint` are the paths that the solution changes beyond those that any policy may, as in `HarborInstance`.
    `safe_path`: the tests pass with PYTHONSAFEPATH=1.
    """

    footprint: tuple[str, ...] = ()
    safe_path: bool = False

    @property
    def fields(self) -> dict[str, object]:
        """The resulting fields of a `HarborInstance`."""
        return {
            name: value for name, value in (("footprint", list(self.footprint)), ("safe_path", self.safe_path)) if value
        }


def keep_evidence(home: Path, archive: str, evidence: TaskEvidence) -> None:
    """Store the evidence of a task by the digest of its archive. Raises NotAllowed, OSError."""
    keep_text(home, CHECKS, f"{archive}.json", json.dumps(evidence.fields))


def evidence_of(home: Path, archive: str) -> TaskEvidence:
    """Return the stored evidence of a task; empty evidence if none can be read."""
    try:
        known = json.loads((kept_in(home, CHECKS) / f"{archive}.json").read_text(encoding="utf-8"))
        return TaskEvidence(tuple(map(str, known.get("footprint", ()))), known.get("safe_path") is True)
    except (OSError, ValueError, TypeError, AttributeError):
        return TaskEvidence()


def findings_of(home: Path, instances: Iterable[Instance]) -> tuple[str, ...]:
    """Return a line for each finding of `farm tasks attack` on these instances: how many, and which.

    Reports of several attacks on one task are combined. Only reads FARM_HOME.
    """
    try:
        reports = [path for path in kept_in(home, ATTACKS).iterdir() if path.suffix == ".json"]
    except OSError:
        return ()
    by_digest: dict[str, list[Path]] = {}
    for path in reports:
        by_digest.setdefault(path.name.partition(".")[0], []).append(path)
    if not by_digest:
        return ()
    instance_ids: dict[str, list[str]] = {name: [] for name in FINDINGS}
    n = 0
    for instance in {each.digest: each for each in instances}.values():
        n += 1
        for name in {name for path in by_digest.get(instance.digest, ()) for name in _findings_in(path)}:
            instance_ids[name].append(instance.instance_id)
    return tuple(_line(name, ids, n) for name, ids in instance_ids.items() if ids)


def _findings_in(path: Path) -> list[str]:
    try:
        return [name for name in json.loads(path.read_text(encoding="utf-8"))["findings"] if name in FINDINGS]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _line(finding: str, ids: Sequence[str], n: int) -> str:
    names = ", ".join(sorted(ids)[:_N_NAMED]) + (", …" if len(ids) > _N_NAMED else "")
    return f"{len(ids)} of {n} tasks {'is' if len(ids) == 1 else 'are'} {finding} by `farm tasks attack` ({names})"
