"""Ids of batches, groups, rollouts and sandboxes: all are built here, and all that come from outside are parsed here.

Each begins with the one above it: `batch`, `batch.group`, `batch.group.sample`; a sandbox's is its rollout's with the
attempt, and `.eval` or `.prepare` if it is not the one that is played in. A sandbox that serves many rollouts is named
after the process that keeps it, and one that a client borrows by chance.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
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
        """Parse an id. Raises NotFound for a text that cannot be one."""
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
    """Return the first batch, group or rollout that a text names, by an id that a farm made; None if it names none."""
    match = _MADE.search(text)
    return None if match is None else RolloutRef.of(match[0])


def new_batch_id() -> str:
    """Return a random id for a new batch."""
    return "b" + secrets.token_hex(5)


def message_id() -> str:
    """Return a random id for a message to a webhook."""
    return "m" + secrets.token_hex(12)


def group_id(batch_id: str, group_index: int) -> str:
    """Return the id of all samples of one instance."""
    return str(RolloutRef(batch_id, group_index))


def rollout_id(batch_id: str, group_index: int, sample_index: int) -> str:
    """Return the id of one sample of one instance."""
    return str(RolloutRef(batch_id, group_index, sample_index))


def batch_of(longer: str) -> str:
    """Return the id of the batch that a group, rollout or sandbox belongs to."""
    return longer.split(".", 1)[0]


def sandbox_id(rollout_id: str, attempt: int) -> str:
    """Return the id of the sandbox that an attempt is played in: a late worker never touches its successor's."""
    return f"{rollout_id}.{attempt}"


def eval_sandbox_id(sandbox_id: str) -> str:
    """Return the id of the sandbox that is scored in, from that of the one that is played in."""
    return f"{sandbox_id}.eval"


def prepare_sandbox_id(sandbox_id: str) -> str:
    """Return the id of the sandbox that is prepared for another one and its siblings."""
    return f"{sandbox_id}.prepare"


def owned_sandbox_id(purpose: Literal["build", "shared"], pid: int, started: int) -> str:
    """Return the id of a new sandbox that a process of a node keeps: to build an image in, or for many rollouts.

    It is needed while that process lives, which started at `started`, in clock ticks.
    """
    return f"{purpose}-{pid}-{started}-{secrets.token_hex(4)}"


def borrowed_sandbox_id() -> str:
    """Return a random id for a sandbox that a client borrows; no batch has it."""
    return "s-" + secrets.token_hex(8)


def is_borrowed(text: str) -> bool:
    """Return whether a text can be the id of a borrowed sandbox; a name that a client gave is none."""
    return _BORROWED.fullmatch(text) is not None


def owner_of_sandbox(sandbox_id: str) -> tuple[int, int] | None:
    """Return the pid and the start of the process that keeps a sandbox; None of those that belong to rollouts."""
    match = _OWNED.fullmatch(sandbox_id)
    return (int(match[1]), int(match[2])) if match else None


def rollout_of_sandbox(sandbox_id: str) -> str:
    """Return the id of the rollout that a sandbox is or was for, in whichever attempt; of any name, so its start."""
    return ".".join(sandbox_id.split(".")[:3])
