"""A process that may hang, and its guard."""

from __future__ import annotations

import os
import select
import signal

from workers.sandboxes.isolation.watcher import Checkpoint, guarded


def test_hung_process_is_restarted_without_the_item_that_it_hung_at() -> None:
    read_end, write_end = os.pipe()

    def work(place: Checkpoint) -> None:
        for name in ("one", "two", "three"):
            if place.at(name):
                os.write(write_end, f"{name} ".encode())
                # hangs, for any reason
                if name == "two":
                    signal.pause()

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        guarded(work)
        os.write(write_end, b"over")
        os._exit(0)
    os.close(write_end)
    try:
        result = b""
        while select.select([read_end], [], [], 60)[0] and (chunk := os.read(read_end, 100)):
            result += chunk
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert result.decode() == "one two one three over"
