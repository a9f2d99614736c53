"""Task archives, on a store."""

from __future__ import annotations

import re
from functools import partial

from sqlalchemy.exc import IntegrityError

from farm.client.archive_uploads import PART_BYTES, ArchiveState, TaskArchives
from farm.errors import InvalidRequest
from farm.store.blobs import stored_archives
from farm.store.database import Store
from farm.task_archive import MAX_ARCHIVE_BYTES, PartStream, check

_DIGEST = re.compile(r"[0-9a-f]{64}")
# tar adds a header and padding to each file
_MAX_PARTS = 2 * MAX_ARCHIVE_BYTES // PART_BYTES


class LocalArchives(TaskArchives):
    """Task archives on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def state(self, digest: str) -> ArchiveState:
        _check_digest(digest)
        n_parts, parts = self._store.read(partial(stored_archives.state, digest=digest))
        return ArchiveState(n_parts is not None, () if n_parts is not None else tuple(parts))

    def put_part(self, digest: str, number: int, data: bytes) -> None:
        _check_digest(digest)
        if not 0 <= number < _MAX_PARTS or not 0 < len(data) <= PART_BYTES:
            raise InvalidRequest(
                f"part {number} of {len(data)} bytes: there may be {_MAX_PARTS} of {PART_BYTES} bytes", field="part"
            )
        write = partial(stored_archives.put_part, digest=digest, number=number, data=stored_archives.packed(data))
        write = partial(write, n_bytes=len(data))
        try:
            self._store.write(write)
        except IntegrityError:  # another client sent the same part at the same moment
            self._store.write(write)

    def complete(self, digest: str, n_parts: int) -> None:
        _check_digest(digest)
        known, _ = self._store.read(partial(stored_archives.state, digest=digest))
        n_bytes = 0
        if known is None:
            stream = PartStream(
                lambda number: self._store.read(partial(stored_archives.part, digest=digest, number=number))
            )
            try:
                check(stream.buffered())
                if stream.digest() != digest or stream.n_parts != n_parts:
                    raise InvalidRequest(
                        f"the {stream.n_parts} stored parts are not the archive {digest}: upload it again",
                        field="digest",
                    )
            except InvalidRequest:
                self._store.write(partial(stored_archives.drop, digest=digest))
                raise
            n_bytes = stream.n_bytes
        write = partial(stored_archives.complete, digest=digest, n_parts=n_parts, n_bytes=n_bytes)
        try:
            self._store.write(write)
        except IntegrityError:
            self._store.write(write)


def _check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest("must be a SHA-256: 64 digits of 0-9 and a-f", field="digest")
