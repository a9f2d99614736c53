"""Orders to engines, and waiting until they are followed: the same for every way to reach a farm.

A client only writes orders into the store. Whoever runs workers carries them out (`workers.fleet`): every worker holds
its new calls back, one of them tells the engine, and each reports what it still has in flight. A client that is killed
leaves its order standing, visible in `farm engines list` and to `farm doctor`, until somebody resumes the engines.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from farm.engine import PauseMode
from farm.errors import FarmUnreachable, InvalidRequest
from farm.signals import HEEDED, Signals
from farm.store.engines import Engine, Paused

log = logging.getLogger(__name__)

MODES: tuple[PauseMode, ...] = ("drain", "keep", "abort")
VERSION_CHARS = 64
_POLL_S = 0.25


class Orders(ABC):
    """Pause, name the weights, resume. `signals` say when to look again."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    @abstractmethod
    def chosen(self, urls: Collection[str] | None = None) -> list[Engine]:
        """These engines, or all of them. Raises NotFound for a URL that is no engine's."""

    @abstractmethod
    def order_pause(self, paused: Paused, by: str, urls: Collection[str] | None) -> dict[str, int]:
        """Order engines to pause, or with "" to go on: URL → the number of its last order. Raises NotFound."""

    @abstractmethod
    def order_version(self, version: str, urls: Collection[str] | None) -> dict[str, int]:
        """Order engines to call their weights this: URL → the number of its last order. Raises NotFound."""

    @abstractmethod
    def left(self, orders: Mapping[str, int], waited_s: float) -> list[str]:
        """What is missing until these are followed and what must end has ended, in words.

        Raises FarmUnreachable if no worker is alive, once that was waited for.
        """

    def pause(self, mode: PauseMode, urls: Collection[str] | None = None, timeout_s: float = 600.0) -> None:
        """Hold back new calls to all engines, or these, and return when they are paused and, but for `keep`, idle.

        Calls that run end first (`drain`), freeze (`keep`) or are cut and go on after `resume` (`abort`). On an engine
        that takes no such orders, `keep` is `drain`, and what `abort` cuts is asked anew.

        Raises TimeoutError naming what still runs, FarmUnreachable if no worker is alive to do it: the order stands
        in the first case and is taken back in the second.
        """
        if mode not in MODES:
            raise InvalidRequest(f"{mode!r} is none of {', '.join(MODES)}", field="mode")
        chosen = self.order_pause(mode, f"{socket.gethostname()}/{os.getpid()}", urls)
        try:
            self._await(chosen, f"pause ({mode})", timeout_s)
        except FarmUnreachable:
            self.order_pause("", "", urls)
            raise

    def resume(self, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> None:
        """Let calls go on. Raises TimeoutError naming the engines that do not resume: the order stands."""
        self._await(self.order_pause("", "", urls), "resume", timeout_s)

    def set_version(self, version: str, urls: Collection[str] | None = None, timeout_s: float = 60.0) -> list[str]:
        """Name the weights that all engines, or these, have now, without cutting what runs.

        Returns those that could not be reached: they get no calls until they are told again. Raises as `pause`.
        """
        if not 0 < len(version) <= VERSION_CHARS:
            raise InvalidRequest(f"must have 1 to {VERSION_CHARS} characters", field="version")
        self._await(self.order_version(version, urls), f"take version {version!r}", timeout_s)
        return [engine.url for engine in self.chosen(urls) if engine.engine_version != version]

    @contextmanager
    def weight_update(
        self, version: str, mode: PauseMode, urls: Collection[str] | None, timeout_s: float
    ) -> Iterator[Sequence[Engine]]:
        """Pause, let the block push weights, name them, resume. The block is given the engines.

        If the block fails the engines stay paused: their weights may be half written, and what they would sample
        belongs to no version. An engine that is out meanwhile gets no calls until it is told that it has them.
        """
        try:
            self.pause(mode, urls, timeout_s)
        except BaseException:
            # no weights have been touched yet
            self.order_pause("", "", urls)
            raise
        try:
            yield self.chosen(urls)
        except BaseException as error:
            error.add_note("the engines stay paused, as their weights may be half written: push again and resume them")
            raise
        if missed := self.set_version(version, urls):
            log.warning("engines that were out when they were to take version %s get no calls: %s", version, missed)
        self.resume(urls)

    def _await(self, orders: Mapping[str, int], what: str, timeout_s: float) -> None:
        """Until all workers follow these orders and the engines were told, and what must end has ended."""
        started = time.monotonic()
        listener = self._signals.listen(HEEDED)
        try:
            while left := self.left(orders, time.monotonic() - started):
                if time.monotonic() - started >= timeout_s:
                    raise TimeoutError(f"engines did not {what} in {timeout_s:g} s: {'; '.join(left[:8])}")
                listener.wait(_POLL_S)
        finally:
            listener.close()
