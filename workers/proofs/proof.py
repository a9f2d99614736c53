"""A proof of one scorer: on this node it gives 1 to a right submission and 0 to a wrong one, by its real route.

A scorer that is broken mostly scores 0, as a wrong answer does. Only a submission of which the score is known shows the
difference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from farm.errors import FarmError, NotFound
from farm.ids import owned_sandbox_id
from farm.records.request import SandboxSpec
from farm.settings import settings
from workers.plugins import registry
from workers.plugins.interfaces import FreshSandbox, Sandbox, SandboxProvider
from workers.plugins.plugin_faults import described

Known: TypeAlias = Literal["right", "wrong"]
"""The name of one of the two submissions."""
PROOF_S = 600.0
"""Seconds for a proof, which a busy node or the installation of packages may need; it takes a few."""


class NotProvable(Exception):
    """A part that the scorer needs is not on this node, so that it can score nothing here yet. Its text says which."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A scorer by its name, and what scores one of its known submissions.

    `score` raises NotProvable if a part of the scorer is not on this node; whatever else it raises is a fault.
    """

    name: str
    score: Callable[[Known], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class ProofResult:
    """The result of a proof. `failure` is empty if it holds; `skipped` says why it was not tried, empty if it was."""

    name: str
    failure: str = ""
    skipped: str = ""
    took_s: float = 0.0


async def prove(proof: Proof, timeout_s: float = PROOF_S) -> ProofResult:
    """Score both submissions of a proof. Raises nothing of the scorer's."""
    started = time.monotonic()
    failure = skipped = ""
    try:
        async with asyncio.timeout(timeout_s):
            failure = await _failure(proof)
    except NotProvable as reason:
        skipped = str(reason)
    except TimeoutError:
        failure = f"it did not score two known submissions within {timeout_s:g} s"
    except FarmError as error:
        failure = str(error)
    except Exception as error:
        failure = described(error)
    return ProofResult(proof.name, failure, skipped, round(time.monotonic() - started, 2))


async def _failure(proof: Proof) -> str:
    if (score := await proof.score("right")) != 1.0:
        return f"it gives a right submission {score:g}, not 1"
    if (score := await proof.score("wrong")) != 0.0:
        return f"it gives a wrong submission {score:g}, not 0"
    return ""


def fresh_of(own: SandboxSpec, put: Callable[[Sandbox], Awaitable[None]] | None = None) -> FreshSandbox:
    """Return what opens sandboxes of a spec on this node, each with what `put` writes into it.

    Opening one raises NotProvable if no kind of sandbox can run here.
    """

    @asynccontextmanager
    async def fresh(spec: SandboxSpec | None = None, *, layer: bool = False) -> AsyncIterator[Sandbox]:
        sandbox = await best_provider().start(owned_sandbox_id("shared"), spec or own)
        try:
            if put is not None:
                await put(sandbox)
            yield sandbox
        finally:
            await asyncio.shield(sandbox.stop())

    return fresh


def best_provider() -> SandboxProvider:
    """Return the kind of sandbox that a batch gets which leaves it open. Raises NotProvable if none can run here."""
    try:
        return registry.chosen_sandbox(settings().sandbox)
    except NotFound as error:
        raise NotProvable(str(error)) from error
