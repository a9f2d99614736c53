"""One run: load, faults by the plan, everything restored, every batch to its end, then the checks."""

from __future__ import annotations

import heapq
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from sqlalchemy import select

import farm
from farm.store import nodes
from farm.store.rollouts import rollouts
from tests.chaos import checks, client
from tests.chaos.checks import BrokenPromise, Evidence
from tests.chaos.faults import KINDS, NotNow, Scene, Strike, faults_of_servers
from tests.chaos.parts import Parts
from tests.chaos.plan import Event
from tests.chaos.strikes import Interventions

_TICK_S = 0.05
_RESTORE_S = 120.0
_AFTER_S = 5.0
_WARM_S = 240.0
_SHOWN = (
    *("rollout_id", "stage", "state", "attempt", "node", "owner", "lease_expires_at", "queued_at", "ready_at"),
    *("resend_at", "n_sends", "failure_message"),
)
"""The columns of a rollout that show what it waits for."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault of the plan and its result.

    `strike` is None if there was no target, or if it `failed`, as `why` says.
    """

    event: Event
    at: float
    strike: Strike | None
    why: str = ""
    failed: bool = False


@dataclass(slots=True)
class Run:
    """`injected` grows as the faults strike, `broken` are the broken promises at the end."""

    parts: Parts
    events: Sequence[Event]
    injected: list[Injected] = field(default_factory=list)
    interventions: Interventions = field(default_factory=Interventions)
    broken: list[BrokenPromise] = field(default_factory=list)
    interrupted: bool = False
    _undos: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def warm_up(self) -> None:
        """Wait for the first completed rollouts: a fault on an idle farm has no effect. Raises RuntimeError."""
        deadline = time.monotonic() + _WARM_S
        while not self._any_ended():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rollout was completed; see {self.parts.logs}")
            self._restart_dead()
            time.sleep(_TICK_S)

    def _any_ended(self) -> bool:
        statement = select(rollouts.c.rollout_id).where(rollouts.c.finish_seq.is_not(None)).limit(1)
        return self.parts.store.read(lambda connection: connection.execute(statement).first()) is not None

    def inject_faults(self) -> None:
        """Inject faults until the plan is done. A Ctrl-C ends this part early, but not the following ones.

        A fault without a target is retried for a while, along with those that follow.
        """
        began = time.monotonic()
        todo = list(self.events)
        try:
            while todo:
                self._restart_dead()
                now = time.monotonic() - began
                due = [event for event in todo if event.at_s <= now]
                over = now > self.events[-1].at_s + _AFTER_S
                done = [event for event in due if self._strike(event, math.inf if over else now - event.at_s)]
                todo = [event for event in todo if event not in done]
                time.sleep(_TICK_S)
        except KeyboardInterrupt:
            self.interrupted = True

    def _restart_dead(self) -> None:
        now = time.monotonic()
        while self._undos and self._undos[0][0] <= now:
            self._undo(heapq.heappop(self._undos)[2])
        if self._store_is_up():
            self.parts.restart_dead()

    def _undo(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except Exception as error:
            self._print(f"could not be undone: {error}")

    def _store_is_up(self) -> bool:
        return self.parts.postgres is None or self.parts.postgres.running

    def _strike(self, event: Event, late_s: float) -> bool:
        """Try to inject a fault and return whether it is finished: injected, impossible, or too late."""
        kind = KINDS[event.kind]
        if kind.needs_store and not self._store_is_up():
            return False
        at = time.time()
        try:
            strike = kind.inject(Scene(self.parts, random.Random(event.draw), self.interventions, self._restart_dead))
        except NotNow as error:
            if late_s < kind.patience_s:
                return False
            self.injected.append(Injected(event, at, None, f"there was not {error}"))
        except Exception as error:
            self.injected.append(Injected(event, at, None, f"{type(error).__name__}: {error}", failed=True))
        else:
            self.injected.append(Injected(event, at, strike))
            if strike.undo is not None:
                heapq.heappush(self._undos, (time.monotonic() + strike.after_s, next(self._numbers), strike.undo))
        last = self.injected[-1]
        self._print(f"{event.kind}: {last.strike.target if last.strike else 'NOT INJECTED, ' + last.why}")
        return True

    def _print(self, words: str) -> None:
        print(time.strftime("%H:%M:%S"), f"{len(self.injected):4}", words, file=sys.stderr, flush=True)

    def restore(self) -> None:
        """Undo all active faults, and wait until every part is up again."""
        self._print("no more faults; all parts are restored")
        while self._undos:
            self._undo(heapq.heappop(self._undos)[2])
        # a fault that was interrupted in the middle has not recorded how to undo it
        self.parts.restore()
        deadline = time.monotonic() + _RESTORE_S
        while not all(part.running or part.ended for part in self.parts.all):
            if time.monotonic() > deadline:
                down = [part.name for part in self.parts.all if not part.running and not part.ended]
                self.broken.append(BrokenPromise("restored", ", ".join(down), "did not come up again"))
                return
            self.parts.restart_dead()
            time.sleep(_TICK_S)
        for url in self.parts.urls:
            self._undo(lambda url=url: faults_of_servers.restore_engine(url))  # type: ignore[misc]
        for thread in threading.enumerate():
            if thread.name == "weights":
                thread.join(90.0)
        self._resume_engines()

    def _resume_engines(self) -> None:
        """Resume engines that a broken update left paused: rollouts would wait for them forever."""
        deadline = time.monotonic() + _RESTORE_S
        while True:
            try:
                self.parts.farm.resume_engines(timeout_s=30.0)
                return
            except (TimeoutError, farm.FarmError) as error:
                if time.monotonic() > deadline:
                    self.broken.append(BrokenPromise("restored", "engines", f"were not resumed: {error}"))
                    return

    def settle(self, deadline_s: float) -> None:
        """Wait until the clients have finished and every batch has ended. A Ctrl-C ends the waiting.

        After it, open rollouts are cancelled.
        """
        self.parts.stop_clients()
        if self.interrupted:
            for batch_id in self.batches():
                self.interventions.cancelled.update(self.parts.farm.cancel(batch_id))
        deadline = time.monotonic() + deadline_s
        try:
            while not all(part.ended for part in self.parts.clients) and time.monotonic() < deadline:
                self._restart_dead()
                time.sleep(_TICK_S)
        except KeyboardInterrupt:
            self.interrupted = True
            deadline = time.monotonic()
        for batch_id in self.batches():
            try:
                self.parts.farm.wait(batch_id, max(0.1, deadline - time.monotonic()))
            except (TimeoutError, farm.FarmError) as error:
                self.broken.append(BrokenPromise("every batch ends", batch_id, str(error)))
        waiting = [part.name for part in self.parts.clients if not part.ended]
        self.broken += [BrokenPromise("every client is given its batches", name, "it still waits") for name in waiting]
        if any(each.promise == "every batch ends" for each in self.broken) or waiting:
            self.report_open_rollouts()

    def report_open_rollouts(self) -> None:
        """Print the open rollouts, and the state of engines and nodes; keep it with the logs."""
        unended = select(rollouts).where(rollouts.c.finish_seq.is_(None)).order_by(rollouts.c.rollout_id)
        words = [f"{state.engine} with {state.n_calls} calls" for state in self.parts.farm.engines()]
        words += map(str, self.parts.store.read(nodes.listing))
        for row in self.parts.store.read(lambda connection: connection.execute(unended).mappings().all()):
            words.append(str({name: row[name] for name in _SHOWN}))
        for each in words:
            self._print(each)
        (self.parts.logs / "unended").write_text("\n".join(words))

    def batches(self) -> list[str]:
        """Return all batches that clients began, and those of poisonous plug-ins."""
        result: dict[str, None] = dict.fromkeys(sorted(self.interventions.poisoned))
        for order in self.parts.orders:
            for line in client.read(order.journal):
                if "batch_id" in line:
                    result[line["batch_id"]] = None
        return list(result)

    def check(self) -> None:
        """Check the promises against the store and the clients' journals."""
        self._print("the checks begin")
        self.broken += checks.all_of(Evidence(self.parts.store, self.parts.orders, self.parts.seed, self.interventions))
        self.broken += [BrokenPromise("a part ends only when it is struck", "", what) for what in self.parts.died]
