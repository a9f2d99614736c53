"""Uploads of task archives: in parts, so that none is ever held whole, and one that broke off goes on."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.task_archive import pack

PART_BYTES = 4_000_000
"""Of all parts but the last, which is shorter."""


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The state of an archive's upload: whole, or the numbers of the parts that are there."""

    whole: bool
    parts: Sequence[int] = ()


class TaskArchives(ABC):
    """The archives of a farm, by their digests. Raises as the verbs of `Farm` do."""

    @abstractmethod
    def state(self, digest: str) -> ArchiveState:
        """Return how much of an archive is there."""

    @abstractmethod
    def put_part(self, digest: str, number: int, data: bytes) -> None:
        """Store a part; harmless when repeated."""

    @abstractmethod
    def complete(self, digest: str, n_parts: int) -> None:
        """Check that the parts are the archive of that digest, and that it is sound; then it can be named.

        Raises InvalidRequest, and then drops the parts.
        """

    def upload(self, path: str | Path) -> str:
        """Upload a folder or a tar; return its digest. One that is there already costs no upload."""
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
