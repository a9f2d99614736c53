"""Another process of the node that uses the same provider, like another worker."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.conformance.trial import PromiseTrial


@asynccontextmanager
async def elsewhere(trial: PromiseTrial, what: str, sandbox_id: str, **fields: object) -> AsyncIterator[Process]:
    """Run a function of `other_worker` until it ends or the block does."""
    kind = type(trial.provider)
    words = [f"{kind.__module__}:{kind.__qualname__}", sandbox_id, trial.spec(**fields).model_dump_json(), trial.mark]
    # a plug-in may be importable only through this process's path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.conformance.other_worker", what, *words),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
