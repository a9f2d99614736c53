"""Connection slots of a process and the order in which they are assigned, without a database."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from farm.store.database import ConnectionSlots
from tests.services.farms import until


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def n_waiting(slots: ConnectionSlots) -> int:
    return len(slots._waiting)


@pytest.mark.parametrize("n_slots", [1, 2])
def test_urgent_uses_come_first_then_the_others_in_order(threads: ThreadPoolExecutor, n_slots: int) -> None:
    slots, order = ConnectionSlots(n_slots, 60.0), list[str]()

    def use(name: str, urgent: bool) -> None:
        with slots.slot(60.0, urgent=urgent):
            order.append(name)

    done: list[Future[None]] = []
    with ExitStack() as others:
        one = slots.slot(60.0)
        for _ in range(n_slots - 1):
            others.enter_context(slots.slot(60.0))
        with one:
            for n, name in enumerate(("read", "write", "renewal", "again", "heartbeat")):
                done.append(threads.submit(use, name, name in {"renewal", "heartbeat"}))
                until(lambda n=n: n_waiting(slots) == n + 1, "it waits")  # type: ignore[misc]
        for each in done:
            each.result(60)
    assert order == ["renewal", "heartbeat", "read", "write", "again"]


@pytest.mark.parametrize("n_slots", [1, 3])
def test_no_more_than_the_slots_are_used_at_a_time(threads: ThreadPoolExecutor, n_slots: int) -> None:
    slots, used, most = ConnectionSlots(n_slots, 60.0), list[int](), list[int]()

    def use(number: int) -> None:
        for _ in range(50):
            with slots.slot(60.0, urgent=number == 0):
                used.append(number)
                most.append(len(used))
                used.pop()

    for each in [threads.submit(use, number) for number in range(12)]:
        each.result(60)
    assert len(most) == 600
    assert max(most) <= n_slots


@pytest.mark.parametrize("left_s", [0.0, -5.0, 1.2])
def test_use_that_times_out_leaves_nothing_behind(left_s: float) -> None:
    slots = ConnectionSlots(1, 60.0)
    with slots.slot(60.0), pytest.raises(NoConnectionLeft, match="for something else"), slots.slot(left_s):
        raise AssertionError("there is one slot")
    assert n_waiting(slots) == 0
    for _ in range(3):
        with slots.slot(0.0), pytest.raises(KeyError):
            raise KeyError
    with slots.slot(math.inf, urgent=True):
        pass


def test_use_without_a_timeout_gets_its_slot(threads: ThreadPoolExecutor) -> None:
    slots, had = ConnectionSlots(1, 60.0), threading.Event()

    def use() -> None:
        with slots.slot(math.inf):
            had.set()

    with slots.slot(60.0):
        waiting = threads.submit(use)
        until(lambda: n_waiting(slots) == 1, "it waits")
        assert not had.is_set()
    waiting.result(60)


class TestAConnectionInUse:
    """A pair of sockets replaces a connection; it cannot be cancelled: one end is read to see if it was broken."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        server, client = socket.socketpair()
        with server, client:
            server.settimeout(60)
            yield server, client

    @pytest.mark.parametrize("n_slots", [1, 2])
    def test_connection_is_broken_for_an_urgent_use_that_waited(
        self, threads: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], n_slots: int
    ) -> None:
        slots = ConnectionSlots(n_slots, 0.05)
        with ExitStack() as stack:
            slots.uses(stack.enter_context(slots.slot(60.0)), ends[1])
            for _ in range(n_slots - 1):
                stack.enter_context(slots.slot(60.0))
            renewal = threads.submit(self._renew, slots)
            assert ends[0].recv(1) == b"", "it was shut"
            # its holder notices by itself
            assert not renewal.done()
        assert renewal.result(60)

    def test_connection_is_not_broken_for_other_uses_or_for_its_own_renewal(
        self, threads: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        slots = ConnectionSlots(1, 0.05)
        with slots.slot(60.0, urgent=True) as slot:
            slots.uses(slot, ends[1])
            with pytest.raises(NoConnectionLeft), slots.slot(0.0):
                raise AssertionError("there is one slot")
            waiting = threads.submit(self._renew, slots)
            with pytest.raises(NoConnectionLeft), slots.slot(0.0):
                raise AssertionError("there is one slot")
            ends[1].send(b"x")
        assert ends[0].recv(1) == b"x"
        assert waiting.result(60)

    def test_released_connection_is_not_broken(
        self, threads: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        slots = ConnectionSlots(1, 0.05)
        with slots.slot(60.0) as slot:
            slots.uses(slot, ends[1])
        with slots.slot(60.0):
            waiting = threads.submit(self._renew, slots)
            with pytest.raises(NoConnectionLeft), slots.slot(0.0):
                raise AssertionError("there is one slot")
        assert waiting.result(60)
        ends[1].send(b"x")
        assert ends[0].recv(1) == b"x"

    def _renew(self, slots: ConnectionSlots) -> bool:
        with slots.slot(60.0, urgent=True):
            return True
