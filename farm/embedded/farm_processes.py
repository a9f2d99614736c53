"""The child processes of a farm's process: restarted at their address when they end, and stopped at its end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import SubprocessError
from typing import Self

from farm.embedded.child_process import ChildProcess
from farm.errors import FarmError, ServiceError

log = logging.getLogger(__name__)

_PERIOD_S = 0.1
_MAX_DEATHS = 5
_WITHIN_S = 60.0


class FarmProcess:
    """One process of the farm, and the function that starts it."""

    def __init__(self, name: str, start: Callable[[], ChildProcess], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._start = start
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self.child = start()

    def restart_if_ended(self) -> None:
        """Restart it if it has ended. Raises ServiceError if it ends too often."""
        if self.child.running:
            return
        how = f"The {self.name} of the farm has exited (status {self.child.process.returncode}); see {self.log_file}"
        self._deaths.append(time.monotonic())
        if len(self._deaths) == _MAX_DEATHS and self._deaths[-1] - self._deaths[0] < _WITHIN_S:
            raise ServiceError(f"{how}: {_MAX_DEATHS} times within a minute, so it is not restarted")
        log.warning("%s; restarting", how)
        try:
            self.child = self._start()
        except (FarmError, OSError, SubprocessError) as error:
            log.error("Restart of the farm's %s failed: %s", self.name, error)


class FarmProcesses:
    """Starts processes, and restarts them in a separate thread from `keep_up` until `stop`.

    The kernel ends processes started by that thread with it, and earlier ones with the caller's thread.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._parts: list[FarmProcess] = []
        self._restart_lock = threading.Lock()
        self._ports = contextlib.ExitStack()
        self._stopping = False
        self._stopped = threading.Event()
        self._given_up: ServiceError | None = None
        self._keeper: threading.Thread | None = None

    def add(self, name: str, start: Callable[[], ChildProcess]) -> FarmProcess:
        """Start a process, whose log is NAME.log."""
        part = FarmProcess(name, start, self.logs / f"{name}.log")
        self._parts.append(part)
        return part

    def port(self, preferred: int = 0, host: str = "127.0.0.1") -> int:
        """Return a free port, the preferred one if possible, and reserve it until `stop`.

        A process takes some time to listen: another farm on this machine that starts meanwhile gets another port.
        """
        while True:
            port = free_port(preferred, host)
            claim = self._ports.enter_context(socket.socket(socket.AF_UNIX))
            try:
                # the name belongs to the network namespace, like the port, and disappears with this process
                claim.bind(f"\0farm-port-{port}")
            except OSError:
                preferred = 0
            else:
                return port

    def keep_up(self) -> None:
        """Restart ended processes from now on."""
        self._keeper = threading.Thread(target=self._keep_up, name="farm-processes", daemon=True)
        self._keeper.start()

    def _keep_up(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            self.restart_ended()

    def restart_ended(self) -> None:
        """Restart ended processes."""
        with self._restart_lock:
            if self._stopping or self._given_up:
                return
            for part in self._parts:
                try:
                    part.restart_if_ended()
                except ServiceError as error:
                    log.error("%s", error)
                    self._given_up = error

    def check(self) -> None:
        """Raise ServiceError if a process ended too often to be restarted."""
        if self._given_up is not None:
            raise self._given_up

    def stop(self, patience_s: float, signals: Mapping[str, int] | None = None) -> None:
        """End all processes, the last started first, by SIGTERM or by the signal in `signals` for its name.

        A process that does not end within `patience_s` is killed. May be repeated.
        """
        with self._restart_lock:
            self._stopping = True
            parts, self._parts = self._parts, []
        for part in reversed(parts):
            part.child.send((signals or {}).get(part.name, signal.SIGTERM))
            part.child.end(patience_s)
        self._stopped.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        self._ports.close()


class StartedFarm(ABC):
    """A farm whose processes this one starts: `with` ends them, including those of a failed start."""

    def __init__(self, logs: Path) -> None:
        self._processes = FarmProcesses(logs)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def _start(self) -> None:
        """Start everything."""

    @abstractmethod
    def stop(self) -> None:
        """End everything. May be repeated."""

    def check(self) -> None:
        """Raise ServiceError if a process ended too often to be restarted."""
        self._processes.check()


def last_lines(log_file: Path, n: int = 5) -> str:
    """Return the last lines of a log, as the end of a message that names it."""
    with contextlib.suppress(OSError):
        if lines := [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]:
            return f"; {log_file} ends with:\n" + "\n".join(f"  {line[:500]}" for line in lines[-n:])
    return f"; {log_file} says why"


def free_port(preferred: int = 0, host: str = "127.0.0.1") -> int:
    """Return a free port: the preferred one if possible."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, preferred))
        except OSError:
            return free_port(0, host)
        return int(probe.getsockname()[1])
