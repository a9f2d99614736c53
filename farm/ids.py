"""Ids of batches, groups, rollouts and sandboxes. All ids are built and parsed here.

Each id begins with its parent's: `batch`, `batch.group`, `batch.group.sample`. A sandbox id is the rollout's id with
the attempt, and `.eval` or `.prepare` unless the rollout runs in it. A sandbox that serves many rollouts is named after
the process that owns it; a borrowed one has a random name.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farm.errors import NotFound

_ID = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.([0-9]{1,9})(?:\.([0-9]{1,9}))?)?", re.ASCII)

_MADE = re.compile(r"(?<![\w.-])b[0-9a-f]{10}(?:\.[0-9]{1,9}){0,2}(?![\w-])", re.ASCII)
_BORROWED = re.compile(r"s-[0-9a-f]{16}", re.ASCII)
_OWNED = re.compile(r"(?:build|shared)-([0-9]{1,9})-([0-9]{1,18})-[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RolloutRef:
    """A reference to a batch, one of its groups (`batch.group`) or one rollout (`batch.group.sample`)."""

    batch_id: str
    group_index: int | None = None
    sample_index: int | None = None

    @classmethod
    def of(cls, text: str) -> RolloutRef:
        """Parse an id. Raises NotFound for an invalid one."""
        match = _ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise NotFound(f"there is no batch, group or rollout {text!r}")
        batch_id, group, sample = match.groups()
        return cls(batch_id, None if group is None else int(group), None if sample is None else int(sample))

    @property
    def kind(self) -> str:
        if self.group_index is None:
            return "batch"
        return "group" if self.sample_index is None else "rollout"

    def __str__(self) -> str:
        return ".".join(str(part) for part in (self.batch_id, self.group_index, self.sample_index) if part is not None)


def first_ref(text: str) -> RolloutRef | None:
    """Return the first batch, group or rollout whose id occurs in a text; None without one."""
    match = _MADE.search(text)
    return None if match is None else RolloutRef.of(match[0])


def new_batch_id() -> str:
    """Return a random id for a new batch."""
    return "b" + secrets.token_hex(5)


def message_id() -> str:
    """Return a random id for a message to a webhook."""
    return "m" + secrets.token_hex(12)


def group_id(batch_id: str, group_index: int) -> str:
    """Return the id of the group of all samples of one instance."""
    return str(RolloutRef(batch_id, group_index))


def rollout_id(batch_id: str, group_index: int, sample_index: int) -> str:
    """Return the id of one sample of one instance."""
    return str(RolloutRef(batch_id, group_index, sample_index))


def batch_of(longer: str) -> str:
    """Return the id of the batch of a group, rollout or sandbox."""
    return longer.split(".", 1)[0]


def sandbox_id(rollout_id: str, attempt: int) -> str:
    """Return the id of an attempt's sandbox, one per attempt: a late worker never touches its successor's."""
    return f"{rollout_id}.{attempt}"


def eval_sandbox_id(sandbox_id: str) -> str:
    """Return the id of the sandbox for scoring, from the id of the rollout's sandbox."""
    return f"{sandbox_id}.eval"


def prepare_sandbox_id(sandbox_id: str) -> str:
    """Return the id of the sandbox that prepares the layer for another one and its siblings."""
    return f"{sandbox_id}.prepare"


def owned_sandbox_id(purpose: Literal["build", "shared"]) -> str:
    """Return a new id for a sandbox owned by this process of a node: to build an image in, or for many rollouts.

    The sandbox lives as long as this process, identified by its pid and its start time in clock ticks.
    """
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{purpose}-{os.getpid()}-{started}-{secrets.token_hex(4)}"


def borrowed_sandbox_id() -> str:
    """Return a random id for a borrowed sandbox, which belongs to no batch."""
    return "s-" + secrets.token_hex(8)


def is_borrowed(text: str) -> bool:
    """Return whether a text can be the id of a borrowed sandbox. Names given by clients cannot."""
    return _BORROWED.fullmatch(text) is not None


def owner_of_sandbox(sandbox_id: str) -> tuple[int, int] | None:
    """Return the pid and start time of the process that owns a sandbox; None for sandboxes of rollouts."""
    match = _OWNED.fullmatch(sandbox_id)
    return (int(match[1]), int(match[2])) if match else None


def rollout_of_sandbox(sandbox_id: str) -> str:
    """Return the id of a sandbox's rollout, whichever its attempt; for other names, their first parts."""
    return ".".join(sandbox_id.split(".")[:3])
