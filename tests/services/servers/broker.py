"""A test's own broker that can be killed, restarted, frozen and disconnected, at a fixed address."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Self

_PORTS = range(15_000, 32_000)
Life = Callable[[], AbstractContextManager["subprocess.Popen[bytes]"]]
"""Runs the server until the block ends; it answers when the block begins."""


class Broker:
    """Runs inside `with`. `cut` closes every connection of its server; clients may reconnect at once."""

    def __init__(
        self, url: str, server: Path | int, over: str, life: Life, cut: Callable[[], None], full: Callable[[bool], None]
    ) -> None:
        self.url = url
        self.server = server
        """Its socket, or its port on this machine."""
        self._over = over
        self.cut = cut
        self.full = full
        """A function that puts it out of memory, or undoes that."""
        self._live = life
        self._life = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def url_at(self, port: int) -> str:
        """Return its URL through a port of this machine that is forwarded to `server`."""
        return self._over.format(port=port)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.thaw()
        self._life.close()

    def start(self) -> None:
        """Start it; it answers on return."""
        self._process = self._life.enter_context(self._live())

    def kill(self) -> None:
        """Kill it as in a machine crash: nothing is sent, nothing is written."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._life.close()

    def freeze(self) -> None:
        """Freeze it: its connections stay and nothing is answered, as in a network that drops all packets."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def free_ports(n: int) -> list[int]:
    """Return free ports of this machine, below the ephemeral range, so that no connection takes one while its
    server is down.
    """
    result: list[int] = []
    while len(result) < n:
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            result += [port] if port not in result else []
    return result
