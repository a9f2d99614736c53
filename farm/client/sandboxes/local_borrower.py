"""Borrowed sandboxes through the store; calls go to the nodes."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from farm.callers import current_caller
from farm.client import serialization
from farm.client.request_checks import check_plugin, checked
from farm.client.sandboxes.borrower import Borrower
from farm.client.sandboxes.node_line import NodeLine, SentCall
from farm.errors import InvalidRequest
from farm.ids import borrowed_sandbox_id, is_borrowed
from farm.notifications import ENDED, Signals
from farm.records.lending.borrowed_sandbox import (
    BorrowedSandbox,
    BorrowRequest,
    RenewOrder,
    SandboxAddress,
    SandboxState,
    check_borrower,
)
from farm.records.lending.sandbox_calls import CALL_S, CALLS, VERBS
from farm.records.request_values import Request
from farm.records.task_needs import TaskNeeds, unsupported
from farm.store import borrowed_sandboxes
from farm.store.access.audit_log import logged
from farm.store.database import Store

_POLL_S = 0.5
_STOPPED = "it was stopped"


class LocalBorrower(Borrower):
    """The verbs on a store and its signals."""

    def __init__(self, store: Store, signals: Signals, max_open: int) -> None:
        self._store = store
        self._signals = signals
        self._max_open = max_open
        self._line = NodeLine(self._sandbox_address)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, request: BorrowRequest) -> None:
        """Raise InvalidRequest for a sandbox that the farm cannot provide or the request does not permit."""
        check_plugin("farm.sandboxes", request.spec.kind, "kind of sandbox", "auto")
        if is_borrowed(request.name):
            raise InvalidRequest("a name must not look like an id", field="name")
        if reasons := unsupported(TaskNeeds(), request.spec, request.network):
            raise InvalidRequest(f"it asks for {reasons[0].replace('submit with', 'start it with')}", field="spec")

    def begin(self, request: BorrowRequest) -> BorrowedSandbox:
        self.check(request)
        create = partial(
            borrowed_sandboxes.create,
            request=request,
            sandbox_id=borrowed_sandbox_id(),
            token=secrets.token_urlsafe(32),
            max_open=self._max_open,
            caller=current_caller(),
        )
        write = logged(
            create, "sandbox start", lambda made: made[0].sandbox_id, request.spec.image, done=lambda made: made[1]
        )
        try:
            state, new = self._store.write(write)
        except IntegrityError:  # another client borrowed by that name at the same moment; now it can be read
            state, new = self._store.write(write)
        if new:
            self._signals.wake()
        return state

    def watched(self, reference: str, wait_s: float) -> BorrowedSandbox:
        deadline = time.monotonic() + wait_s
        state = self._read(reference)
        if not state.pending or wait_s <= 0:
            return state
        listener = self._signals.listen(ENDED)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                listener.wait(min(left_s, _POLL_S), lambda channel, message: message == state.sandbox_id)
                now = self._read(state.sandbox_id)
                if not now.pending:
                    return now
        finally:
            listener.close()
        return self._read(state.sandbox_id)

    def _read(self, reference: str) -> BorrowedSandbox:
        caller = current_caller()
        return self._store.read(lambda connection: borrowed_sandboxes.one(connection, reference, caller))

    def _own(self, reference: str) -> BorrowedSandbox:
        """Like `_read`. Raises Forbidden for a sandbox that the caller may not change."""
        state = self._read(reference)
        check_borrower(current_caller(), state.sandbox_id, state.borrower)
        return state

    def newest_named(self, name: str) -> BorrowedSandbox | None:
        """Return the newest sandbox with a name, ended or not; None if none is remembered."""
        caller = current_caller()
        return self._store.read(lambda connection: borrowed_sandboxes.newest_named(connection, name, caller))

    def finish_named(self, name: str) -> None:
        """End the sandbox with a name as if its borrower did; one that has ended counts as finished from now on."""
        finish = partial(borrowed_sandboxes.finish_named, name=name, why=_STOPPED, caller=current_caller())
        self._tell(self._store.write(logged(finish, "sandbox stop", name, done=bool)))

    def counts(self, prefix: str = "") -> dict[SandboxState, int]:
        """Return the number of sandboxes whose names have this prefix, by state, without the ended ones."""
        return dict(self._store.read(lambda connection: borrowed_sandboxes.counts(connection, prefix)))

    def list(self, limit: int = 100, ended: bool = False, before: str | None = None) -> Sequence[BorrowedSandbox]:
        return self._store.read(lambda connection: borrowed_sandboxes.listing(connection, limit, ended, before))

    def renew(self, reference: str, lease_s: float | None = None) -> BorrowedSandbox:
        lease_s = checked(RenewOrder, {"lease_s": lease_s}).lease_s
        state = self._own(reference)
        renew = partial(borrowed_sandboxes.renew, sandbox_ids=[state.sandbox_id], lease_s=lease_s)
        self._store.write(renew)
        state = self._read(state.sandbox_id)
        if state.ended:
            raise state.ended_error()
        return state

    def stop(self, reference: str) -> BorrowedSandbox:
        state = self._own(reference)
        if not state.ended:
            end = partial(borrowed_sandboxes.end, sandbox_ids=[state.sandbox_id], why=_STOPPED, finished=True)
            self._tell(self._store.write(logged(end, "sandbox stop", state.sandbox_id, done=bool)))
        return self._read(state.sandbox_id)

    def _tell(self, ended: Sequence[str]) -> None:
        for sandbox_id in ended:
            self._signals.ended(sandbox_id)
        if ended:
            self._signals.sandboxes()

    def address(self, reference: str) -> tuple[BorrowedSandbox, SandboxAddress | None]:
        """Return a sandbox and, if it runs, its address. Raises NotFound."""
        caller = current_caller()
        return self._store.read(lambda connection: borrowed_sandboxes.address(connection, reference, caller))

    async def _sandbox_address(self, reference: str) -> tuple[BorrowedSandbox, SandboxAddress | None]:
        return await asyncio.to_thread(self.address, reference)

    def call(self, reference: str, call: Request) -> Any:
        verb = VERBS[type(call)]
        sent = SentCall(verb, serialization.written(call), getattr(call, "timeout_s", CALL_S))
        asking = asyncio.run_coroutine_threadsafe(self._line.call(reference, sent), self._started_loop())
        return serialization.read(CALLS[verb][1], asking.result())

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="sandbox-calls", daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Close the connections to the nodes; borrowed sandboxes stay."""
        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._line.aclose(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None
