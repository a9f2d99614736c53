"""The worker's client of its fork server."""

from __future__ import annotations

import os
from pathlib import Path

from tests.services.farms import until
from workers.sandboxes.processes.fork_client import ForkClient


def fork_servers() -> list[int]:
    """Return the fork servers that are children of this process."""
    children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in children if b"isolation.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_closed_client_leaves_no_process_and_starts_another_on_the_next_call() -> None:
    before = fork_servers()
    client = ForkClient()
    for _ in range(2):
        client.request({"do": "nothing"}, []).close()
        # a process has no command line for a moment during its exec
        until(lambda: len(fork_servers()) == len(before) + 1, "it has a fork server")
        client.close()
        assert fork_servers() == before
    client.close()
