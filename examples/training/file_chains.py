"""The problems of "follow the files", generated from a seed: fields of instances of the data source `follow_files`.

Each of the files a to z names another. Files outside the chain do, too, so that one hop too few or too many gives a
wrong name and no error. 1 to 4 hops take 2 to 5 turns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase
from typing import Any

DATA_SOURCE = "follow_files"
MAX_HOPS = 4


@dataclass(frozen=True, slots=True)
class FileChain:
    """One problem, in the form that `examples/training/follow_files` reads."""

    files: dict[str, str]
    start: str
    hops: int
    answer: str

    @property
    def request(self) -> str:
        """The message to the policy."""
        return f"follow {self.start} hops {self.hops}"

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


def file_chain(random: Random) -> FileChain:
    """Draw one problem."""
    hops = random.randint(1, MAX_HOPS)
    chain = random.sample(ascii_lowercase, hops + 1)
    files = {name: random.choice(ascii_lowercase) for name in ascii_lowercase}
    files.update(pairwise(chain))
    return FileChain(files, chain[0], hops, chain[-1])


def file_chains(seed: int, step: int, n: int) -> list[FileChain]:
    """Return the problems of a training step; equal arguments give equal problems."""
    random = Random(f"{seed}/{step}")
    return [file_chain(random) for _ in range(n)]
