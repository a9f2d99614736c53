"""Runs in a sandbox: measures actions in SWE-ReX's bash session, without its usual HTTP server.

Prints a JSON list of seconds; the number of actions is the argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime


async def main(n: int) -> None:
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())
    times = []
    for _ in range(n + 3):
        started = time.perf_counter()
        done = await runtime.run_in_session(BashAction(command="echo hi", timeout=10))
        times.append(time.perf_counter() - started)
        assert (done.exit_code, done.output.strip()) == (0, "hi"), done
    await runtime.close()
    print(json.dumps(times[3:]))


asyncio.run(main(int(sys.argv[1])))
