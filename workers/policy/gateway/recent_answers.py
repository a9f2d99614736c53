"""The answers of a rollout's last requests, for those that are sent again because their reply was lost.

A request is known by the digest of its body, which has its whole conversation. It is sent again if its client had gone
before it read the answer, or if the client says so: the clients of OpenAI and Anthropic count their tries in a header.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from workers.plugins.interfaces import Completion

_TRIES = "x-stainless-retry-count"
_MAX_ANSWERS = 8
"""Number of answers that are kept, and as many of clients that had gone."""
_MAX_TOLD = 64


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether a client says that it has sent this request before."""
    n_tries = headers.get(_TRIES, "")
    return n_tries.isdecimal() and int(n_tries[:9]) > 0


class RecentAnswers:
    """The last answers of one rollout, those that nobody read, and the requests that are answered now."""

    def __init__(self) -> None:
        self._read: dict[bytes, Completion] = {}
        self._unread: dict[bytes, Completion] = {}
        self._open: dict[bytes, asyncio.Future[None]] = {}
        self._errors: Counter[bytes] = Counter()

    @property
    def n_unread(self) -> int:
        return len(self._unread)

    async def known(self, digest: bytes, retry: bool, settle: Callable[[], Awaitable[None]]) -> Completion | None:
        """Return the answer to an earlier try of a request; None if it is to be sampled.

        `settle` waits until all answers are recorded.
        """
        if retry and self._errors[digest]:
            # its earlier try was answered by an error; an equal request of another agent may have an answer
            self._errors[digest] -= 1
            return None
        while retry and (first := self._open.get(digest)) is not None:
            # nobody may have noticed yet that its client has gone
            await asyncio.wait({first})
        if digest not in self._unread and not (retry and digest in self._read):
            return None
        # before it is taken, as its client may go again
        await settle()
        unread = self._unread.pop(digest, None)
        return unread if unread is not None or not retry else self._read.get(digest)

    @contextmanager
    def answering(self, digest: bytes) -> Iterator[None]:
        """Within it a request is answered. An error that leaves it is told to the client."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # of equal requests at once the last: one of them is enough to wait for
        self._open[digest] = done
        try:
            yield
        except Exception:
            self._errors[digest] += 1
            _drop_first(self._errors, _MAX_TOLD)
            raise
        finally:
            done.set_result(None)
            if self._open.get(digest) is done:
                del self._open[digest]

    def keep(self, digest: bytes, completion: Completion) -> None:
        """Keep an answer that is sent to its client, without its prompt, which may be long."""
        self._read.pop(digest, None)
        self._read[digest] = replace(completion, prompt_ids=None)
        _drop_first(self._read, _MAX_ANSWERS)

    def went_unread(self, digest: bytes, completion: Completion) -> None:
        """Keep an answer whose client had gone before all of it was sent."""
        self._unread[digest] = completion
        _drop_first(self._unread, _MAX_ANSWERS)


def _drop_first(kept: dict[bytes, Completion] | Counter[bytes], most: int) -> None:
    while len(kept) > most:
        kept.pop(next(iter(kept)))
