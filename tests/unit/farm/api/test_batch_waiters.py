"""Requests that wait for a batch: a notification wakes them; a shutdown answers them without a query."""

from __future__ import annotations

import asyncio

import pytest

from farm.api.endpoints import BatchWaiters
from farm.notifications import Signals


def test_shutdown_answers_waiting_and_querying_requests() -> None:
    async def main() -> list[int]:
        waiters = BatchWaiters(Signals(""))
        stuck = asyncio.Event()
        n_queries = 0

        async def ask() -> int:
            nonlocal n_queries
            n_queries += 1
            if n_queries > 5:
                stuck.set()
                await asyncio.Event().wait()
            return n_queries

        def wait(poll_s: float) -> asyncio.Task[int]:
            return asyncio.create_task(waiters.wait_until("b", ask, lambda result: False, 3600, poll_s))

        waiting = [wait(3600) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiters._wake("b")
        await stuck.wait()
        waiting.append(asyncio.create_task(waiters.wait_until("c", ask, lambda result: True, 3600)))
        await asyncio.sleep(0)
        n_before = n_queries
        waiters.close()
        results = await asyncio.wait_for(asyncio.gather(*waiting[:5]), 60)
        assert n_queries == n_before
        assert not waiting[5].done(), "its first query has no result before"
        waiting[5].cancel()
        late = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(late[5], asyncio.CancelledError)
        return results

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]


def test_request_cancelled_during_its_query_is_cancelled() -> None:
    async def main() -> None:
        waiters = BatchWaiters(Signals(""))
        querying = asyncio.Event()
        n_queries = 0

        async def ask() -> int:
            nonlocal n_queries
            n_queries += 1
            if n_queries == 2:
                querying.set()
                await asyncio.Event().wait()
            return n_queries

        waiting = asyncio.create_task(waiters.wait_until("b", ask, lambda result: False, 3600, 0.0))
        await querying.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiters.close()

    asyncio.run(main())
