"""A worker's borrowed sandboxes: writes that the store refused are repeated, and each sandbox is stopped once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from farm.callers import Caller
from farm.errors import StoreUnavailable
from farm.notifications import Signals
from farm.records.lending.borrowed_sandbox import BorrowRequest
from farm.settings import settings
from farm.store import borrowed_sandboxes
from farm.store.borrowed_sandboxes import NodeSandboxRow
from farm.store.database import Store
from workers.config import own_config
from workers.lending.lent_sandbox import LentSandbox
from workers.process.lender import Lender
from workers.process.loop import Loop

ID = "s-0123456789abcdef"


class CountedSandbox:
    """A sandbox that can only be stopped."""

    sandbox_id = ID

    def __init__(self) -> None:
        self.n_stops = 0

    async def stop(self) -> None:
        self.n_stops += 1


@pytest.fixture
def lender(sqlite_store: Store) -> Iterator[Lender]:
    loop = Loop()
    caller = Caller("me")
    create = partial(borrowed_sandboxes.create, request=BorrowRequest(), sandbox_id=ID, token="t", max_open=1)
    sqlite_store.write(lambda connection: create(connection, caller=caller))
    node = settings().node
    sqlite_store.write(lambda connection: borrowed_sandboxes.place(connection, {ID: node}))
    yield Lender(sqlite_store, Signals(""), loop, settings())
    loop.close()


def lent(sandbox: CountedSandbox) -> LentSandbox:
    return LentSandbox(own_config().sandboxes, sandbox, "t", 600.0)  # type: ignore[arg-type]


def test_renewal_that_the_store_refused_is_still_due(
    lender: Lender, sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender._held[ID] = lent(CountedSandbox())

    def away(work: Any) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as during:
        during.setattr(sqlite_store, "write", away)
        with pytest.raises(StoreUnavailable):
            lender._look()
    renewed: list[Any] = []
    monkeypatch.setattr(sqlite_store, "write", renewed.append)
    lender._look()
    lender._look()
    assert len(renewed) == 1


def test_sandbox_that_ends_while_its_address_is_written_is_stopped_once(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = CountedSandbox()

    async def ended_meanwhile(work: Any) -> bool:
        lender._end(ID)
        return False

    monkeypatch.setattr(lender, "_written", ended_meanwhile)
    row = NodeSandboxRow(ID, BorrowRequest(), 600.0, "", "t")

    async def serve() -> None:
        await lender._serve(row, sandbox)  # type: ignore[arg-type]
        for closing in list(lender._closing):
            await closing

    lender._loop.run(serve())
    assert (sandbox.n_stops, lender._held) == (1, {})
