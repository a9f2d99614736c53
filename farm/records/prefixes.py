"""Search for the longest of many sequences of token ids that is a prefix of a prompt.

The longest candidates are compared directly: one of them nearly always matches. If an agent rewrites its history every
turn, none does, and all differ in only a few places; then hashes of all prefixes of the prompt, computed once, select
the candidates to compare. So a call costs a few passes over its ids, however many calls came before it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_N_DIRECT = 4


class Prefixes:
    """Sequences of ids by number, each with the digests of its images in order.

    Images of one size have equal placeholder ids: a prefix must also match in its images.
    """

    def __init__(self) -> None:
        self._ids: dict[int, NDArray[np.int32]] = {}
        self._hashes: dict[int, int] = {}
        self._images: dict[int, tuple[str, ...]] = {}

    def put(self, number: int, ids: NDArray[np.int32], images: tuple[str, ...] = ()) -> None:
        """Add or replace a sequence."""
        self._ids[number] = ids
        self._images[number] = images
        self._hashes.pop(number, None)

    def share(self, number: int, whole: NDArray[np.int32]) -> None:
        """Replace a sequence that is a prefix of `whole` by a view of it, to save memory."""
        self._ids[number] = whole[: len(self._ids[number])]

    def length(self, number: int) -> int:
        return len(self._ids[number])

    def longest(self, prompt: NDArray[np.int32], before: int | None = None, images: tuple[str, ...] = ()) -> int | None:
        """Return the number of the longest prefix of the prompt, the highest of equals, below `before`."""
        known = [
            (len(ids), number)
            for number, ids in self._ids.items()
            if len(ids) <= len(prompt)
            and (before is None or number < before)
            and _begin_with(images, self._images[number])
        ]
        known.sort(reverse=True)
        for n, number in known[:_N_DIRECT]:
            if np.array_equal(prompt[:n], self._ids[number]):
                return number
        if len(known) <= _N_DIRECT:
            return None
        hashes = prefix_hashes(prompt)
        for n, number in known[_N_DIRECT:]:
            if self._hash(number) == last_hash(hashes[:n]) and np.array_equal(prompt[:n], self._ids[number]):
                return number
        return None

    def _hash(self, number: int) -> int:
        if number not in self._hashes:
            self._hashes[number] = last_hash(prefix_hashes(self._ids[number]))
        return self._hashes[number]


def _begin_with(images: tuple[str, ...], known: tuple[str, ...]) -> bool:
    return not known or images[: len(known)] == known


def prefix_hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return the hash of the ids up to and including each one, [n]; arithmetic is modulo 2**64."""
    scrambled = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR
    scrambled ^= scrambled >> np.uint64(29)
    scrambled *= _powers((len(ids) + 1).bit_length())[: len(ids)]
    return np.cumsum(scrambled, dtype=np.uint64)


def last_hash(hashes: NDArray[np.uint64]) -> int:
    """Return the hash of all the ids; 0 for none."""
    return int(hashes[-1]) if len(hashes) else 0


@lru_cache(maxsize=32)
def _powers(bits: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(1 << bits, _FACTOR, np.uint64), dtype=np.uint64)
