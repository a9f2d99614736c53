"""Runs the tests and reads the plugin's lines; sent into sandboxes as text, after the source of `descendants.py`.

It is a separate process next to pytest's. Other processes of its user cannot trace or read it (not dumpable). It holds
the only way out, its standard output, and reports the command's end, the CPU time of all its descendants, and the delay
of its own clock meanwhile. No descendant outlives the command.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workers.evaluators.program_tests.descendants import adopt_descendants, descendants_cpu_s, end_descendants

_POLL_S = 0.1
_DRAIN_S = 2.0
_MAX_RECORDS = 6_000_000
_MAX_TAIL = 20_000


def _high(descriptor: int) -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = min(most, 4096) if most > 0 else 4096
    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD, random.SystemRandom().randrange(most // 2, most - 16))
    os.close(descriptor)
    return number


class ObservedRun:
    """One run of the command: each pipe's data, its end, and the delay of the clock."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._streams = {"records": bytearray(), "output": bytearray()}
        self._selector = selectors.DefaultSelector()
        self._late_s = 0.0

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        process = self._start()
        timed_out = not self._wait(process, started + self._request["limit_s"])
        if timed_out:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        end_descendants()
        self._read(0)
        return {
            "code": code,
            "timed_out": timed_out,
            "cpu_s": descendants_cpu_s(),
            "late_s": self._late_s,
            "wall_s": time.monotonic() - started,
            **{name: base64.b64encode(data).decode() for name, data in self._streams.items()},
        }

    def _start(self) -> subprocess.Popen[bytes]:
        request = self._request
        records, output = os.pipe(), os.pipe()
        value = _high(records[1])
        secret = os.pipe()
        os.write(secret[1], f"{value} {request['key']}".encode())
        os.close(secret[1])
        secret_end = _high(secret[0])
        folder = tempfile.mkdtemp()
        Path(folder, f"{request['plugin']}.py").write_text(request["source"])
        env = {
            **os.environ,
            **request["env"],
            "OUTCOMES_FD": str(secret_end),
            "PYTHONPATH": ":".join([*request["pythonpath"], folder]),
        }
        process = subprocess.Popen(
            ["bash", "-c", request["command"]],
            cwd=request["tree"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output[1],
            stderr=output[1],
            pass_fds=(value, secret_end),
            start_new_session=True,
        )
        for descriptor in (value, secret_end, output[1]):
            os.close(descriptor)
        for name, end in (("records", records[0]), ("output", output[0])):
            os.set_blocking(end, False)
            self._selector.register(end, selectors.EVENT_READ, name)
        return process

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        while process.poll() is None:
            now = time.monotonic()
            if now >= deadline:
                return False
            self._read(_POLL_S)
            self._late_s += max(0.0, time.monotonic() - now - _POLL_S)
        return True

    def _read(self, wait_s: float) -> None:
        """Wait for data and read it; without waiting, read all that is there, for _DRAIN_S at most."""
        until = time.monotonic() + _DRAIN_S
        while (ready := self._selector.select(wait_s)) and time.monotonic() < until:
            for key, _ in ready:
                try:
                    data = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    self._selector.unregister(key.fd)
                self._take(key.data, data)
            if wait_s:
                return

    def _take(self, name: str, data: bytes) -> None:
        stream = self._streams[name]
        if name == "output":
            stream += data
            del stream[:-_MAX_TAIL]
        elif len(stream) < _MAX_RECORDS:
            stream += data


def main() -> None:
    adopt_descendants()
    json.dump(ObservedRun(json.load(sys.stdin)).run(), sys.stdout)


if __name__ == "__main__":
    main()
