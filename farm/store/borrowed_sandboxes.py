"""Borrowed sandboxes: their requests, nodes, addresses, leases and ends.

The state follows from the row: without a node it waits for room; with a node and no address its worker starts it; with
an address it runs; `ended_at` is final. Every change is one UPDATE guarded by the expected values. Rows that another
transaction holds are skipped until the next time, so no two transactions ever wait for each other; only a borrower
that ends its own sandboxes does wait.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, literal, select, update

from farm.callers import Caller
from farm.errors import Conflict, NotFound, Overloaded
from farm.ids import is_borrowed
from farm.records.lending.borrowed_sandbox import (
    MAX_LEASE_S,
    BorrowedSandbox,
    BorrowRequest,
    SandboxAddress,
    SandboxState,
    lease_left,
)
from farm.store.access import api_keys
from farm.store.locks import lock_room
from farm.store.rollouts import chunks
from farm.store.sql.clock import age_of, db_now, due, left_until
from farm.store.sql.sanitize import is_plain
from farm.store.sql.schema import BorrowedSandboxRow

borrowed = BorrowedSandboxRow.__table__

_KEPT_S = 86_400.0
"""Seconds that ended sandboxes are remembered."""
_live = borrowed.c.ended_at.is_(None)


@dataclass(frozen=True, slots=True)
class NodeSandboxRow:
    """A borrowed sandbox for the worker of its node; without an address it is to be started."""

    sandbox_id: str
    request: BorrowRequest
    lease_s: float
    url: str
    token: str


@dataclass(frozen=True, slots=True)
class WaitingSandboxes:
    """The sandboxes of one priority that wait for room; `n_placed` others of that priority have a node."""

    priority: int
    n_waiting: int
    n_placed: int


def create(
    connection: Connection, request: BorrowRequest, sandbox_id: str, token: str, max_open: int, caller: Caller
) -> tuple[BorrowedSandbox, bool]:
    """Return (sandbox, whether it is new); an open one of the same caller and name is returned again.

    Raises Conflict if that had a different request, Overloaded at the limit of open sandboxes, of all or of one caller.
    """
    if connection.execute(select(borrowed.c.sandbox_id).where(borrowed.c.sandbox_id == sandbox_id)).first() is not None:
        # an earlier try was committed, but its answer was lost
        return one(connection, sandbox_id, caller), True
    body = request.model_dump(mode="json")
    fingerprint = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    if request.name:
        row = connection.execute(
            select(borrowed.c.sandbox_id, borrowed.c.fingerprint).where(*_named(request.name, caller), _live)
        ).one_or_none()
        if row is not None:
            if row.fingerprint != fingerprint:
                raise Conflict(f"sandbox {row.sandbox_id} has the name {request.name!r} and a different request")
            renew(connection, [row.sandbox_id])
            return one(connection, row.sandbox_id, caller), False
    _check_room(connection, max_open, caller)
    values = {
        "sandbox_id": sandbox_id,
        "borrower": caller.name,
        "name": request.name or None,
        "fingerprint": fingerprint,
        "priority": request.priority,
        "request": body,
        "token": token,
        "lease_s": request.lease_s,
    }
    now = {"lease_expires_at": db_now() + request.lease_s, "created_at": db_now()}
    connection.execute(insert(borrowed).values(**values, **now))
    return one(connection, sandbox_id, caller), True


def _check_room(connection: Connection, max_open: int, caller: Caller) -> None:
    if caller.max_open is not None:
        api_keys.lock(connection, caller.name)
    lock_room(connection, "sandboxes")
    n_open = func.count(literal(1))
    n_own = n_open.filter(borrowed.c.borrower == caller.name)
    n, own = connection.execute(select(n_open, n_own).select_from(borrowed).where(_live)).tuples().one()
    if n >= max_open:
        raise Overloaded(f"{n} sandboxes are borrowed, which is the limit FARM_MAX_SANDBOXES: stop some first")
    if caller.max_open is not None and own >= caller.max_open:
        raise Overloaded(f"key {caller.name!r} has borrowed {own} sandboxes, which is its quota: stop some first")


def _named(name: str, caller: Caller) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return borrowed.c.name == name, borrowed.c.borrower == caller.name


def _select_states() -> Any:
    left = left_until(borrowed.c.lease_expires_at, MAX_LEASE_S)
    return select(borrowed, left.label("left_s"), age_of(borrowed.c.created_at).label("age_s"))


def _state_of(row: Any) -> BorrowedSandbox:
    if row.ended_at is not None:
        state = SandboxState.ENDED
    elif row.node is None:
        state = SandboxState.WAITING
    else:
        state = SandboxState.RUNNING if row.url else SandboxState.STARTING
    spec = row.request["spec"]
    return BorrowedSandbox(
        sandbox_id=row.sandbox_id,
        state=state,
        borrower=row.borrower,
        name=row.name or "",
        node=row.node or "",
        image=spec["image"],
        lease_s=row.lease_s,
        lease_left_s=0.0 if row.ended_at is not None else lease_left(row.left_s),
        age_s=max(0.0, row.age_s),
        ended_why=row.ended_why,
        finished=bool(row.finished),
        # rows that an earlier release wrote have fewer fields
        labels=row.request.get("labels", {}),
        cpus=spec.get("cpus"),
        memory_mb=spec["limits"]["memory_mb"],
        disk_mb=spec["limits"]["disk_mb"],
    )


def one(connection: Connection, reference: str, caller: Caller) -> BorrowedSandbox:
    """Return a sandbox by its id, or the newest by its name, the caller's own first. Raises NotFound."""
    is_it = (borrowed.c.sandbox_id if is_borrowed(reference) else borrowed.c.name) == reference
    own_first = case((borrowed.c.borrower == caller.name, 0), else_=1)
    statement = _select_states().where(is_it).order_by(own_first, borrowed.c.created_at.desc())
    row = connection.execute(statement).first() if is_plain(reference) else None
    if row is None:
        raise NotFound(f"there is no borrowed sandbox {reference!r:.220}")
    return _state_of(row)


def newest_named(connection: Connection, name: str, caller: Caller) -> BorrowedSandbox | None:
    """Return the caller's newest sandbox of a name, ended or open; None if there is none."""
    own = _select_states().where(*_named(name, caller)).order_by(borrowed.c.created_at.desc())
    row = connection.execute(own.limit(1)).first()
    return None if row is None else _state_of(row)


def address(connection: Connection, reference: str, caller: Caller) -> tuple[BorrowedSandbox, SandboxAddress | None]:
    """Return a sandbox by its id or name, and its address if it runs. Raises NotFound."""
    state = one(connection, reference, caller)
    row = connection.execute(
        select(borrowed.c.url, borrowed.c.token).where(borrowed.c.sandbox_id == state.sandbox_id)
    ).one_or_none()
    if row is None or state.state is not SandboxState.RUNNING:
        return state, None
    return state, SandboxAddress(state.sandbox_id, state.borrower, state.node, row.url, row.token)


def listing(
    connection: Connection, limit: int, with_ended: bool = False, before: str | None = None
) -> list[BorrowedSandbox]:
    """Return the newest sandboxes, newest first, or those before the id `before`. Raises NotFound for that id."""
    created_at, sandbox_id = borrowed.c.created_at, borrowed.c.sandbox_id
    statement = _select_states().order_by(created_at.desc(), sandbox_id).limit(limit)
    if before is not None:
        at = connection.execute(select(created_at).where(sandbox_id == before)).scalar_one_or_none()
        if at is None:
            raise NotFound(f"there is no borrowed sandbox {before!r:.220}")
        statement = statement.where((created_at < at) | (created_at == at) & (sandbox_id > before))
    return [_state_of(row) for row in connection.execute(statement if with_ended else statement.where(_live))]


def counts(connection: Connection, prefix: str = "") -> Mapping[SandboxState, int]:
    """Return the number of sandboxes, whose names begin with `prefix`, in each state but the last."""
    statement = select(borrowed.c.node, borrowed.c.url).where(
        _live, borrowed.c.name.startswith(prefix, autoescape=True)
    )
    n_of_state = Counter(
        SandboxState.WAITING if node is None else SandboxState.RUNNING if url else SandboxState.STARTING
        for node, url in connection.execute(statement).tuples()
    )
    return {state: n_of_state[state] for state in SandboxState if state is not SandboxState.ENDED}


def renew(connection: Connection, sandbox_ids: Collection[str], lease_s: float | None = None) -> int:
    """Renew these leases, with a new length if `lease_s` is given. Returns how many sandboxes are still open."""
    n = 0
    for ids in chunks(sorted(sandbox_ids)):
        some = select(borrowed.c.sandbox_id).where(borrowed.c.sandbox_id.in_(ids), _live)
        length = borrowed.c.lease_s if lease_s is None else literal(lease_s)
        statement = (
            update(borrowed)
            .where(borrowed.c.sandbox_id.in_(some.with_for_update(skip_locked=True)))
            .values(lease_expires_at=db_now() + length, lease_s=length)
        )
        n += connection.execute(statement).rowcount
    return n


def end(connection: Connection, sandbox_ids: Collection[str], why: str, *, finished: bool = False) -> list[str]:
    """End these sandboxes, unless they have ended. Returns the ids of those that it ended."""
    return _end(connection, why, borrowed.c.sandbox_id.in_(sorted(sandbox_ids)), finished=finished)


def _end(connection: Connection, why: str, *conditions: ColumnElement[bool], finished: bool = False) -> list[str]:
    # a borrower does not come back to try again, so this waits for locked rows
    some = select(borrowed.c.sandbox_id).where(_live, *conditions).with_for_update(skip_locked=not finished)
    statement = (
        update(borrowed)
        .where(borrowed.c.sandbox_id.in_(some))
        .values(ended_at=db_now(), ended_why=why, finished=int(finished))
        .returning(borrowed.c.sandbox_id)
    )
    return sorted(connection.execute(statement).scalars())


def finish_named(connection: Connection, name: str, why: str, caller: Caller) -> list[str]:
    """End the caller's sandboxes of a name as finished by the borrower, and mark ended ones so, too.

    Returns the ids of those that it ended.
    """
    ended = _end(connection, why, *_named(name, caller), finished=True)
    lost = update(borrowed).where(*_named(name, caller), borrowed.c.ended_at.is_not(None))
    connection.execute(lost.values(finished=1))
    return ended


def occupied(connection: Connection) -> Counter[str]:
    """Return node → number of borrowed sandboxes that run or start there."""
    statement = (
        select(borrowed.c.node, func.count(literal(1)))
        .where(_live, borrowed.c.node.is_not(None))
        .group_by(borrowed.c.node)
    )
    return Counter({str(node): n for node, n in connection.execute(statement).tuples()})


def waiting(connection: Connection, limit: int) -> list[WaitingSandboxes]:
    """Return the sandboxes that wait for room, by priority; at most `limit` of each are counted."""
    n_waits = func.count(literal(1)).filter(borrowed.c.node.is_(None))
    statement = (
        select(borrowed.c.priority, n_waits.label("n_waiting"), func.count(literal(1)).label("n"))
        .where(_live)
        .group_by(borrowed.c.priority)
    )
    return [
        WaitingSandboxes(row.priority, min(row.n_waiting, limit), row.n - row.n_waiting)
        for row in connection.execute(statement)
        if row.n_waiting
    ]


def next_of(connection: Connection, priority: int, limit: int) -> Sequence[str]:
    """Return the ids of the next sandboxes of a priority to place, the oldest first."""
    statement = (
        select(borrowed.c.sandbox_id)
        .where(_live, borrowed.c.node.is_(None), borrowed.c.priority == priority)
        .order_by(borrowed.c.created_at, borrowed.c.sandbox_id)
        .limit(limit)
    )
    return connection.execute(statement).scalars().all()


def place(connection: Connection, nodes_of: Mapping[str, str]) -> None:
    """Assign sandboxes to nodes, by id; ended ones are skipped."""
    for sandbox_id, node in sorted(nodes_of.items()):
        unplaced = (borrowed.c.sandbox_id == sandbox_id, borrowed.c.node.is_(None), _live)
        connection.execute(update(borrowed).where(*unplaced).values(node=node))


def of_node(connection: Connection, node: str) -> list[NodeSandboxRow]:
    """Return the open sandboxes of a node."""
    statement = select(borrowed).where(_live, borrowed.c.node == node)
    return [
        NodeSandboxRow(row.sandbox_id, BorrowRequest.model_validate(row.request), row.lease_s, row.url, row.token)
        for row in connection.execute(statement)
    ]


def ids_of_node(connection: Connection, node: str) -> set[str]:
    """Return the ids of the open sandboxes of a node."""
    return set(connection.execute(select(borrowed.c.sandbox_id).where(_live, borrowed.c.node == node)).scalars())


def note_address(connection: Connection, sandbox_id: str, node: str, url: str) -> bool:
    """Store the address of a sandbox that runs. False if it has ended."""
    own = (borrowed.c.sandbox_id == sandbox_id, borrowed.c.node == node, _live)
    return connection.execute(update(borrowed).where(*own).values(url=url)).rowcount == 1


def end_on(connection: Connection, nodes: Collection[str], why: str) -> list[str]:
    """End all sandboxes of these nodes. Returns their ids."""
    return _end(connection, why, borrowed.c.node.in_(sorted(nodes)))


def give_up_unstarted(connection: Connection, node: str) -> int:
    """Take sandboxes that have not started off a node. Returns how many."""
    unstarted = (_live, borrowed.c.node == node, borrowed.c.url == "")
    return connection.execute(update(borrowed).where(*unstarted).values(node=None)).rowcount


def any_expired(connection: Connection) -> bool:
    """Return whether `end_expired` would find any; a read, so that an idle farm writes nothing."""
    return connection.execute(select(literal(1)).where(*_expired).limit(1)).first() is not None


_expired = (_live, due(borrowed.c.lease_expires_at, MAX_LEASE_S))


def end_expired(connection: Connection) -> list[str]:
    """End the sandboxes whose lease expired without use. Returns their ids."""
    return _end(connection, "its lease ran out without a call", *_expired[1:])


def forget_ended(connection: Connection) -> int:
    """Delete the rows of sandboxes that ended long ago. Returns how many."""
    long_ago = age_of(borrowed.c.ended_at) > _KEPT_S
    return connection.execute(delete(borrowed).where(borrowed.c.ended_at.is_not(None), long_ago)).rowcount
