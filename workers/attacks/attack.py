"""One attack: what it leaves in the sandbox or answers, and the plan of those that a task is tried with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_WORK = "no-work"
"""The class of submissions that do nothing: a reward for one makes the task vacuous."""
SKIPPED_TESTS = "skipped-tests"
"""The class of those by which tests are skipped: a reward for one makes the task skippable."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A submission by name and class (`kind`): in this order its files, its command, its answer.

    `files` are written to the sandbox by their paths, and `command` is bash in its working directory. `test_files` are
    added to the tests of a task folder instead, at the end of a file that is there.
    """

    name: str
    kind: str
    answer: str = "done"
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    test_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """The attacks for one task, and its own solution; None if the task brings none, or brings it as a script."""

    attacks: Sequence[Attack] = ()
    solution: Attack | None = None


def of_class(kind: str, codes: Mapping[str, str | tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return code by name, each with its class: `kind`, unless an entry names its own."""
    return {name: (kind, code) if isinstance(code, str) else code for name, code in codes.items()}


UNTOUCHED = Attack("untouched", NO_WORK)
"""The submission of a policy that does nothing and says `done`."""
