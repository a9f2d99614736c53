"""Progress of a watched batch: until its end, through an outage, in a terminal, a notebook and a log."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rich.console import Console

from farm.client.batch_progress import follow, watch
from farm.client.local import LocalFarm
from farm.errors import NotFound, StoreUnavailable
from farm.notifications import Signals
from farm.records.rollout import BatchStatus
from farm.store.database import Store
from tests.contract.store.test_store import announce, place, run_to_end
from tests.services.farms import NOOP


class UnreliableFarm(LocalFarm):
    """A farm whose store is unavailable for some queries."""

    away: Iterator[bool] = iter(())

    def status(self, batch_id: str) -> BatchStatus:
        if next(self.away, False):
            raise StoreUnavailable("the database does not answer")
        return super().status(batch_id)


@pytest.fixture
def here(sqlite_store: Store) -> UnreliableFarm:
    announce(sqlite_store)
    return UnreliableFarm(sqlite_store, Signals(""), 1000)


def submitted(here: LocalFarm) -> str:
    batch_id = here.submit({"instances": [NOOP], "n_samples": 2})
    place(here.store, batch_id)
    return batch_id


def test_progress_continues_through_an_outage_until_the_end(here: UnreliableFarm) -> None:
    batch_id = submitted(here)
    here.away = iter([False, False, True, True])
    followed = follow(here, batch_id)
    first = next(followed)
    assert (first.status.n_finished, first.left_s, first.lines) == (0, None, ())
    run_to_end(here.store, f"{batch_id}.0.0", reward=0.5)
    assert "retrying: the database does not answer" in next(followed).lines[0]
    run_to_end(here.store, f"{batch_id}.0.1", reward=1.0)
    *_, last = followed
    assert (last.status.done, last.status.mean_reward, last.lines, last.left_s) == (True, 0.75, (), 0.0)
    assert last.per_s > 0


def test_unknown_batch_and_timeout_are_errors(here: UnreliableFarm) -> None:
    with pytest.raises(NotFound):
        here.watch("b0000000000")
    with pytest.raises(TimeoutError, match="0/2 ended"):
        here.watch(submitted(here), timeout_s=0.01)


def test_log_gets_lines_and_terminal_gets_a_table(here: UnreliableFarm) -> None:
    batch_id = submitted(here)
    for index in range(2):
        run_to_end(here.store, f"{batch_id}.0.{index}")
    for terminal in (False, True):
        file = io.StringIO()
        status = watch(here, batch_id, Console(file=file, force_terminal=terminal, color_system=None, width=120))
        assert status.n_completed == 2
        assert "2/2 ended" in file.getvalue()
        assert "queued" in file.getvalue()


def test_watch_async_ends_with_the_batch_or_its_task(here: UnreliableFarm) -> None:
    async def both() -> int:
        batch_id = submitted(here)
        watching = asyncio.create_task(here.watch_async(batch_id))
        await asyncio.sleep(0)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        here.cancel(batch_id)
        return (await here.watch_async(batch_id)).n_cancelled

    assert asyncio.run(both()) == 2


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console
import farm
from farm.client.batch_progress import watch
shell = InteractiveShell.instance()
shown = []
shell.display_pub.publish = lambda data, **more: shown.append((data, more))
with farm.connect(sys.argv[1]) as client:
    watch(client, sys.argv[2], Console(force_jupyter=True))
(_, first), *rest = shown
assert rest, "the cell is drawn anew"
assert {more["transient"]["display_id"] for _, more in rest} == {first["transient"]["display_id"]}
assert all(more["update"] for _, more in rest)
assert "2/2 ended" in rest[-1][0]["text/html"], rest[-1]
"""


def test_notebook_gets_one_updated_cell(here: UnreliableFarm) -> None:
    batch_id = submitted(here)
    here.cancel(batch_id)
    subprocess.run([sys.executable, "-c", NOTEBOOK, here.store.url, batch_id], check=True, timeout=600)
