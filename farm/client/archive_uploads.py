"""Uploads of task archives in parts: none is held in memory whole, and an interrupted upload continues."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.task_archive import pack

PART_BYTES = 4_000_000
"""Size of all parts but the last, which is shorter."""


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The state of an upload: complete, or the numbers of the parts already stored."""

    whole: bool
    parts: Sequence[int] = ()


class TaskArchives(ABC):
    """The task archives of a farm, by digest. Raises like the verbs of `Farm`."""

    @abstractmethod
    def state(self, digest: str) -> ArchiveState:
        """Return the state of an archive's upload."""

    @abstractmethod
    def put_part(self, digest: str, number: int, data: bytes) -> None:
        """Store a part; safe to repeat."""

    @abstractmethod
    def complete(self, digest: str, n_parts: int) -> None:
        """Check that the parts form a valid archive with this digest; from then on batches can name it.

        Raises InvalidRequest after dropping the parts.
        """

    def upload(self, path: str | Path) -> str:
        """Upload a folder or a tar; return its digest. An archive that is already stored is not uploaded again."""
        with tempfile.TemporaryFile() as archive:
            digest = pack(Path(path), archive)
            n_bytes = archive.seek(0, 2)
            n_parts = -(-n_bytes // PART_BYTES)
            state = self.state(digest)
            if not state.whole:
                for number in sorted(set(range(n_parts)) - set(state.parts)):
                    archive.seek(number * PART_BYTES)
                    self.put_part(digest, number, archive.read(PART_BYTES))
            self.complete(digest, n_parts)
        return digest
