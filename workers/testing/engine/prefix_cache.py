"""The double's prefix cache: whole blocks, keyed by a hash of all ids up to their end.

It has two halves. When the newer one is full it becomes the older one, and the former older one's blocks are evicted
unless used since. So a block is never cached without all blocks before it.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import TokenIds
from workers.testing.engine.logprobs import mixed

BLOCK_TOKENS = 16
CACHE_TOKENS = 2**24


class PrefixCache:
    """`n_queries` and `n_hits` count tokens, as vLLM's metrics do."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, size_tokens: int = CACHE_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._n_half = max(size_tokens // block_tokens // 2, 1)
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._multipliers = mixed(np.arange(1, block_tokens + 1, dtype=np.uint64)) | np.uint64(1)
        self.n_queries = 0
        self.n_hits = 0

    def look(self, prompt: TokenIds, salt: str = "") -> int:
        """Return how many of a prompt's first tokens are cached, always fewer than all. Counts as a query."""
        hashes = self._hashes(prompt[: max(len(prompt) - 1, 0)], salt)
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._newer or hashes[middle - 1] in self._older:
                low = middle
            else:
                high = middle - 1
        self.n_queries += len(prompt)
        self.n_hits += low * self._block_tokens
        return low * self._block_tokens

    def keep(self, ids: TokenIds, salt: str = "") -> None:
        """Cache the whole blocks of computed ids."""
        if len(self._newer) >= self._n_half:
            self._older, self._newer = self._newer, set()
        self._newer.update(self._hashes(ids, salt))

    def clear(self) -> None:
        self._newer.clear()
        self._older.clear()

    @property
    def usage(self) -> float:
        """The used share of its capacity."""
        return min((len(self._newer) + len(self._older)) / (2 * self._n_half), 1.0)

    def _hashes(self, ids: TokenIds, salt: str) -> list[int]:
        """Return a hash for each whole block, of all ids up to its end: the sum of the blocks' own hashes, each mixed
        with its position."""
        n = len(ids) // self._block_tokens
        blocks = ids[: n * self._block_tokens].astype(np.uint64).reshape(n, self._block_tokens)
        own: NDArray[np.uint64] = mixed((blocks + np.uint64(1)) * self._multipliers).sum(axis=1, dtype=np.uint64)
        places = np.arange(n, dtype=np.uint64)
        sums = np.cumsum(mixed(own + places), dtype=np.uint64)
        hashes: list[int] = (sums ^ np.uint64(zlib.crc32(salt.encode()))).tolist()
        return hashes
