"""Runs in a sandbox: measures cells with jupyter_client and ipykernel over TCP, as notebooks and most tools use them.

Prints a JSON list of seconds, the first from the kernel's start to the end of the first cell; the argument is the
number of cells.
"""

from __future__ import annotations

import json
import sys
import time

from jupyter_client.manager import start_new_kernel


def main(n: int) -> None:
    started = time.perf_counter()
    manager, client = start_new_kernel()
    times = [_cell(client) and time.perf_counter() - started]
    for _ in range(n):
        started = time.perf_counter()
        assert _cell(client) == "2"
        times.append(time.perf_counter() - started)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    print(json.dumps(times))


def _cell(client) -> str:  # type: ignore[no-untyped-def]
    shown = []

    def note(message) -> None:  # type: ignore[no-untyped-def]
        if message["msg_type"] == "execute_result":
            shown.append(message["content"]["data"]["text/plain"])

    client.execute_interactive("1+1", timeout=60, output_hook=note)
    return str(shown[0])


main(int(sys.argv[1]))
