"""The borrowed sandboxes of a worker: it starts those assigned to its node, serves their calls, and ends them.

The store is read every second, and sooner after a notification; only its rows count. While the store is unavailable,
calls are answered as usual, and nothing ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, suppress
from functools import partial

from farm.errors import SandboxError, StoreUnavailable
from farm.notifications import SANDBOXES, Signals
from farm.records.lending.borrowed_sandbox import BorrowRequest
from farm.records.sandbox_spec import SandboxSpec
from farm.settings import Settings
from farm.store import borrowed_sandboxes
from farm.store.borrowed_sandboxes import NodeSandboxRow
from farm.store.database import Store
from workers.config import SandboxConfig
from workers.lending.lent_sandbox import LentSandbox
from workers.lending.sandbox_server import MAX_CONNECTIONS, SandboxServer
from workers.plugins import registry
from workers.plugins.interfaces import Sandbox
from workers.plugins.plugin_faults import fault_of
from workers.policy.gateway.app import bind, listening
from workers.process.loop import Loop

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_PATIENCE_S = 2.0
_START_S = 1800.0
"""Time limit of a start, including the build of its image."""
_END_S = 10.0


class Lender:
    """Call `start` once. Works on the worker's event loop, and reads the store from its own thread."""

    def __init__(self, store: Store, signals: Signals, loop: Loop, options: Settings) -> None:
        self._store = store
        self._signals = signals
        self._loop = loop
        self._options = options
        self._config = SandboxConfig.of(options)
        self._held: dict[str, LentSandbox] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._renewed_at: dict[str, float] = {}
        self._starts = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lending", daemon=True)
        self._server: AbstractAsyncContextManager[None] | None = None
        self._url = ""

    def start(self) -> None:
        """Listen, and start to look for sandboxes of this node. Raises OSError if it cannot listen."""
        listener, self._url = bind(self._options.node_address)
        self._server = listening(SandboxServer(self._held).app, [listener], MAX_CONNECTIONS)
        self._loop.run(self._server.__aenter__())
        self._thread.start()

    def close(self) -> None:
        """Stop answering. The node ends the running sandboxes, or the next worker attaches to them."""
        self._stopped.set()
        if self._server is not None:
            with suppress(TimeoutError):
                self._loop.run(self._close(self._server), within_s=_END_S)
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    async def _close(self, server: AbstractAsyncContextManager[None]) -> None:
        await server.__aexit__(None, None, None)
        for task in self._starting.values():
            task.cancel()

    def _run(self) -> None:
        with closing(self._signals.listen(SANDBOXES)) as listener:
            while not self._stopped.is_set():
                try:
                    self._look()
                except StoreUnavailable:
                    pass
                except Exception:
                    log.exception("Borrowed sandboxes not checked; retrying")
                listener.wait(_PERIOD_S)

    def _look(self) -> None:
        requested_at = time.monotonic()
        read = partial(borrowed_sandboxes.of_node, node=self._options.node)
        rows = self._store.read(read, patience_s=_PATIENCE_S)
        broken, used = self._loop.run(self._settle(rows))
        if broken:
            why = "it broke: its first process has ended"
            self._store.write(partial(borrowed_sandboxes.end, sandbox_ids=broken, why=why))
        if used:
            self._store.write(partial(borrowed_sandboxes.renew, sandbox_ids=used))
            # only now: renewals that the store did not accept are still due
            self._renewed_at.update(dict.fromkeys(used, requested_at))

    async def _settle(self, rows: Sequence[NodeSandboxRow]) -> tuple[list[str], list[str]]:
        """Start new sandboxes and end old ones. Returns the ids of broken ones, and of those with a renewal due."""
        rows_by_id = {row.sandbox_id: row for row in rows}
        for sandbox_id in {*self._held, *self._starting} - rows_by_id.keys():
            self._end(sandbox_id)
        for sandbox_id, row in rows_by_id.items():
            if sandbox_id in self._held:
                self._held[sandbox_id].lease_s = row.lease_s
            elif sandbox_id not in self._starting:
                self._starting[sandbox_id] = task = asyncio.create_task(self._begun(row))
                task.add_done_callback(partial(self._note_start, sandbox_id))
        broken = [sandbox_id for sandbox_id, lent in self._held.items() if lent.broken]
        return broken, [sandbox_id for sandbox_id in self._held if self._is_due(sandbox_id)]

    def _is_due(self, sandbox_id: str) -> bool:
        """Return whether a sandbox was used since the last renewal of its lease, and a renewal is due."""
        lent, since = self._held[sandbox_id], self._renewed_at.get(sandbox_id, 0.0)
        return (lent.in_use or lent.used_at > since) and time.monotonic() - since >= lent.lease_s / 10

    def _note_start(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        self._starting.pop(sandbox_id, None)
        _log_fault(sandbox_id, task)

    def _end(self, sandbox_id: str) -> None:
        """Stop a sandbox in a separate task, or cancel its start."""
        self._renewed_at.pop(sandbox_id, None)
        if (lent := self._held.pop(sandbox_id, None)) is not None:
            task = asyncio.create_task(lent.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.add_done_callback(partial(_log_fault, sandbox_id))
        elif not self._starting[sandbox_id].cancelling():
            self._starting[sandbox_id].cancel()

    async def _begun(self, row: NodeSandboxRow) -> None:
        """Start or find a sandbox and write its address. If that fails, end its row with the reason."""
        name = row.sandbox_id
        try:
            async with asyncio.timeout(_START_S), self._starts:
                sandbox = await self._attached_or_started(row)
        except Exception as error:
            fault = fault_of(error, name, "its start", SandboxError)
            log.warning("Borrowed sandbox %s did not start: %s", name, fault)
            await self._written(partial(borrowed_sandboxes.end, sandbox_ids=[name], why=f"it did not start: {fault}"))
        else:
            await self._serve(row, sandbox)
        await asyncio.to_thread(self._signals.ended, name)

    async def _serve(self, row: NodeSandboxRow, sandbox: Sandbox) -> None:
        lent = LentSandbox(self._config, sandbox, row.token, row.lease_s, lost_state=bool(row.url))
        name = row.sandbox_id
        try:
            # served first, because its address is useless before that
            self._held[name] = lent
            note = partial(borrowed_sandboxes.note_address, sandbox_id=name, node=self._options.node, url=self._url)
            runs = await self._written(note)
        except BaseException:
            await asyncio.shield(self._close_held(name))
            raise
        if not runs:
            await self._close_held(name)

    async def _close_held(self, sandbox_id: str) -> None:
        """Stop a sandbox, unless this was started already, because its end was seen while its address was written."""
        if (lent := self._held.pop(sandbox_id, None)) is not None:
            await lent.close()

    async def _written(self, work: partial[bool] | partial[list[str]]) -> bool | list[str]:
        written: Future[bool | list[str]] = self._store.submit(work)
        return await asyncio.wrap_future(written)

    async def _attached_or_started(self, row: NodeSandboxRow) -> Sandbox:
        spec = _permitted(row.request)
        provider = registry.chosen_sandbox(spec.kind, self._options.sandbox)
        try:
            return await provider.attach(row.sandbox_id, spec)
        except SandboxError as missing:
            if row.url:
                raise SandboxError(f"lost with the worker that held it: {missing}") from missing
        return await provider.start(row.sandbox_id, spec)


def _log_fault(sandbox_id: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("Borrowed sandbox %s not checked: %s", sandbox_id, error, exc_info=error)


def _permitted(request: BorrowRequest) -> SandboxSpec:
    """Return the spec with the network that its request permits. Calls have no phase except that of the run."""
    network = request.network == "allow" and (request.spec.network or "run" in request.spec.network_in)
    return request.spec.model_copy(update={"network": network, "network_in": ()})
