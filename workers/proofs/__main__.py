"""Run the proofs of this node's scorers: `python -m workers.proofs [NAME ...]` prints the result of each as JSON.

With `--fetch` the packages that a scorer needs are fetched first if they are not on this node.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from workers.evaluators.grader import LIBRARIES
from workers.evaluators.grading import shared_grader
from workers.proofs.known_submissions import proofs
from workers.proofs.proof import Proof, prove

_FETCH = "--fetch"
_AT_A_TIME = 4
"""Proofs that run at a time: most of them wait for a process."""


async def _run(chosen: Sequence[Proof]) -> None:
    room = asyncio.Semaphore(_AT_A_TIME)

    async def one(proof: Proof) -> None:
        async with room:
            result = await prove(proof)
        print(json.dumps(asdict(result)), flush=True)

    try:
        await asyncio.gather(*map(one, chosen))
    finally:
        await asyncio.gather(*(shared_grader(library).aclose() for library in LIBRARIES))


def main(words: Sequence[str]) -> None:
    """Run the proofs of these names, or all of them."""
    known = proofs(fetch=_FETCH in words)
    names = [word for word in words if word != _FETCH]
    if unknown := [name for name in names if name not in {proof.name for proof in known}]:
        sys.exit(f"there is no proof {unknown[0]!r}; there are: {', '.join(proof.name for proof in known)}")
    asyncio.run(_run([proof for proof in known if not names or proof.name in names]))


if __name__ == "__main__":
    main(sys.argv[1:])
