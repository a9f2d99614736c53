"""How much a sandbox's writable layer takes, counted by a child: nobody has to wait for that; standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from workers.sandboxes import linux


class LayerSize:
    """Begun when made; `take` what came of it. Raises OSError if there can be no child; the kernel is to reap it."""

    def __init__(self, folder: int) -> None:
        self._text = b""
        self._pipe, write_end = os.pipe()
        child = -1
        try:
            child = os.fork()
        finally:
            if child:
                os.close(write_end)
                if child < 0:
                    os.close(self._pipe)
        if child == 0:
            with contextlib.suppress(OSError):
                linux.die_with_parent(signal.SIGKILL)
                # only root of a user namespace can enter every folder of it
                linux.become_root_of_a_new_user_namespace()
            began = time.monotonic()
            size = _size(folder)
            os.write(write_end, f"{size} {time.monotonic() - began}".encode())
            os._exit(0)

    def take(self, wait_s: float) -> tuple[int, float] | None:
        """Bytes, and how long counting took; none if nobody could. None if it goes on after `wait_s`."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        deadline = time.monotonic() + wait_s
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            data = os.read(self._pipe, 64)
            if not data:
                size, took_s = (self._text or b"0 0").split()
                return int(size), float(took_s)
            self._text += data
        return None

    def close(self) -> None:
        os.close(self._pipe)


def _size(folder: int) -> int:
    """Bytes that the writable layer takes. What is nested deeper than Python can follow is not counted."""
    total = 0
    with contextlib.suppress(OSError, RecursionError):
        for _, folders, files, descriptor in os.fwalk("upper", dir_fd=folder):
            for name in (*folders, *files):
                with contextlib.suppress(OSError):
                    total += 512 * os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks
    return total
