"""The head that a node follows: awaited, found again after it moves, and if requested, run on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from farm.configuration.config_file import pinned
from farm.embedded.child_process import ChildProcess
from farm.embedded.farm_processes import FarmProcesses
from farm.launch.shared_address import await_address
from farm.launch.way_to_head import WayToHead
from farm.settings import choose, settings

_STOP_S = 10.0


class FollowedHead:
    """`with FollowedHead(folder, here)` waits for a head and chooses the settings for it; a signal ends the wait.

    With `here`, a head of this machine stands by. It ends after the node, which hands its work back to it.
    """

    def __init__(self, folder: Path, here: bool) -> None:
        self._folder = folder.absolute()
        self._processes = FarmProcesses(self._folder / "logs")
        self._name = f"head-{settings().node}"
        # the environment without a head: a restarted head would otherwise take its own servers for the site's
        self._env = {**os.environ, **pinned(), "FARM_HOME": str(self._folder)}
        self._here = here
        self._ended = threading.Event()
        self._way: WayToHead | None = None

    def __enter__(self) -> Self:
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        if self._here:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._processes.add(self._name, self._start_head)
        try:
            address = await_address(self._folder, lambda text: click.echo(text, err=True), going_on=self._goes_on)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if address is not None:
            self._way = WayToHead(self._folder, address)
            os.environ |= self._way.service_variables()
            choose(**self._way.node_settings())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.stop(_STOP_S, {self._name: signal.SIGINT})

    @property
    def reached(self) -> bool:
        """False if a signal came before there was a head."""
        return self._way is not None

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors that the node's other processes must not inherit."""
        assert self._way is not None
        return self._way.descriptors

    def follow(self) -> None:
        """Follow the head from now on, in threads."""
        assert self._way is not None
        self._way.follow()
        self._processes.keep_up()

    def _goes_on(self) -> bool:
        self._processes.restart_ended()
        return not self._ended.is_set()

    def _end(self, number: int, frame: object) -> None:
        self._ended.set()

    def _start_head(self) -> ChildProcess:
        argv = [sys.executable, "-m", "farm.cli.main", "head", "--dir", str(self._folder), "--standby", "--of-node"]
        log = self._processes.logs / f"{self._name}.log"
        return ChildProcess(argv, env=self._env, log=log, on_parent_death=signal.SIGINT)
