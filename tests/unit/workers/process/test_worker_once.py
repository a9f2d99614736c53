"""A process has one worker, however many threads request it at the same time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers.process.worker import Once

N = 16


def test_concurrent_requests_create_one_worker() -> None:
    """Tasks create it concurrently if the start of their process failed; two workers would not share their claims."""
    together = threading.Barrier(N)

    def make() -> object:
        time.sleep(0.05)
        return object()

    once = Once(make)

    def ask() -> object:
        together.wait(600)
        return once()

    with ThreadPoolExecutor(N) as threads:
        result = [threads.submit(ask) for _ in range(N)]
        assert len({id(each.result(60)) for each in result}) == 1
    assert once.made is once()


def test_failed_creation_is_repeated_by_the_next_request() -> None:
    tries = iter([OSError("the store is frozen")])

    def make() -> int:
        for error in tries:
            raise error
        return 7

    once = Once(make)
    with pytest.raises(OSError, match="frozen"):
        once()
    assert once.made is None
    assert once() == 7
