"""The claim to be the head of a folder, held by one process at a time, across machines.

It is a file lock, inherited by the head's Postgres: it is free when both have ended, however they ended. Some network
file systems keep such locks per machine. So the head also increments a counter in a file, and another head takes over
only if the previous one said that it ended, its process is known to be gone, or the file did not change for a while.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from farm.embedded.node_folder import locked
from farm.errors import Conflict
from farm.home import write_own
from farm.store.node_names import is_gone, this_process

log = logging.getLogger(__name__)

SILENT_S = 20.0
"""Seconds without a change of the counter until the head of another machine counts as dead."""
_ENDING_S = 60.0
"""Seconds that the Postgres of a gone head gets to end; after that the lock belongs to another farm."""
_PERIOD_S = 2.0
_POLL_S = 0.5


def is_led(folder: Path, silent_s: float = SILENT_S) -> bool:
    """Return whether a folder has a live head, as far as known; for another machine's, by its counter."""
    claim = HeadClaim(folder)
    before = claim.status()
    if not before or claim.has_ended():
        return False
    deadline = time.monotonic() + silent_s
    while time.monotonic() < deadline:
        if claim.status() != before:
            return not claim.has_ended()
        time.sleep(_POLL_S)
    return False


class HeadClaim:
    """`acquire`, then `release`; meanwhile a thread increments the counter. `lost`: another head has taken over."""

    def __init__(
        self, folder: Path, silent_s: float = SILENT_S, beat_s: float = _PERIOD_S, ending_s: float = _ENDING_S
    ) -> None:
        self._folder = folder
        self._file = folder / "head.json"
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._ending_s = ending_s
        self._token = secrets.token_hex(8)
        self._lock: IO[str] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = False
        self.from_elsewhere = False
        """True if the previous head was on another machine, or in another container of it."""

    @property
    def lock_fd(self) -> int:
        """The descriptor of the lock, which holds it while any process has it open."""
        assert self._lock is not None
        return self._lock.fileno()

    def acquire(self, waits: bool, going_on: Callable[[], bool]) -> bool:
        """Become the head; with `waits`, as soon as there is no other. False if `going_on` became false before.

        Raises Conflict if there is another and it does not wait.
        """
        logged, deadline = False, time.monotonic() + self._ending_s
        while going_on():
            try:
                if self._lock is None:
                    self._lock = locked(self._folder / "lock", "")
            except Conflict:
                pass
            if self._lock is not None and self._is_free(going_on):
                self._begin()
                return True
            if not waits and (not self.has_ended() or time.monotonic() > deadline):
                self._unlock()
                before = self.status()
                where = f", on {before['host']}" if before.get("host") and not before.get("ended") else ""
                raise Conflict(f"a farm runs in {self._folder} already{where}; stop it, or choose another folder")
            if not logged:
                logged = True
                log.warning("Another head holds %s; waiting to replace it", self._folder)
            time.sleep(_POLL_S)
        self._unlock()
        return False

    def has_ended(self) -> bool:
        """Return whether the previous head said that it ended, or its process (not its Postgres) is known to be
        gone."""
        before = self.status()
        return bool(before) and bool(before.get("ended") or is_gone(before.get("process")))

    def _is_free(self, going_on: Callable[[], bool]) -> bool:
        """Return whether there is no head: there was none, it has ended, or it is silent."""
        before = self.status()
        if not before or self.has_ended():
            return True
        silent_since = time.monotonic()
        while going_on():
            if self.status() != before:
                return False
            if time.monotonic() - silent_since >= self._silent_s:
                silent = before.get("host"), self._silent_s
                log.warning("Head on %s was silent for %g s; replacing it", *silent)
                return True
            time.sleep(_POLL_S)
        return False

    def _begin(self) -> None:
        before = self.status()
        process, own = before.get("process", {}), this_process()
        self.from_elsewhere = bool(before) and any(process.get(name) != own[name] for name in ("boot", "pids"))
        self._write(0)
        self._thread = threading.Thread(target=self._count, name="head-claim", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        n = 0
        while not self._ended.wait(self._beat_s):
            n += 1
            try:
                if self.status().get("head") not in (self._token, None):
                    log.error("Another head has taken over %s; exiting", self._folder)
                    self.lost = True
                    return
                self._write(n)
            except OSError as error:
                log.warning("Claim file %s not written: %s", self._file, error)

    def release(self) -> None:
        """Say that it has ended, and release the lock; once the Postgres has ended, too."""
        self._ended.set()
        try:
            if self._thread is not None:
                self._thread.join()
                if not self.lost:
                    self._write(-1, ended=True)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def status(self) -> dict[str, Any]:
        """Return the last status written by a head; empty if missing or invalid."""
        try:
            status = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) and isinstance(status.get("process", {}), dict) else {}

    def _write(self, n: int, ended: bool = False) -> None:
        status = {"head": self._token, "host": socket.gethostname(), "process": this_process(), "n": n, "ended": ended}
        write_own(self._file, json.dumps(status))
