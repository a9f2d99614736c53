"""What an id names: every id of a batch, a group or a rollout that comes in from outside is read here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from farm.errors import NotFound

_ID = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.([0-9]{1,9})(?:\.([0-9]{1,9}))?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """What an id names: a batch, one of its groups (`batch.group`) or one rollout (`batch.group.sample`)."""

    batch_id: str
    group_index: int | None = None
    sample_index: int | None = None

    @classmethod
    def of(cls, text: str) -> Target:
        """Raises NotFound for what cannot be an id."""
        found = _ID.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise NotFound(f"there is no batch, group or rollout {text!r}")
        batch_id, group, sample = found.groups()
        return cls(batch_id, None if group is None else int(group), None if sample is None else int(sample))

    @property
    def kind(self) -> str:
        if self.group_index is None:
            return "batch"
        return "group" if self.sample_index is None else "rollout"

    def __str__(self) -> str:
        return ".".join(str(part) for part in (self.batch_id, self.group_index, self.sample_index) if part is not None)
