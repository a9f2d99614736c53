"""The LLM servers of the farm, and their orders: pause, resume, name their weights.

A row has the order (`paused`, `version`) and the last state sent to the engine (`engine_paused`, `engine_version`).
Orders are counted in `n_orders`; the process that executes one writes its number to `n_done`. So a client that waits
for an order knows when it took effect, and if a process crashes half way, another executes its order. An engine that
was out when its weights were named does not have them, so a later order does not send it their name. An engine that is
added later is expected to have the weights that were last named for its model, even if the engines that had them were
removed. It gets no calls before those weights were pushed to it and named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Row, Select, case, delete, func, insert, select, update

from farm.callers import Caller, Scope
from farm.configuration.service_urls import normal_url, sound_key
from farm.errors import Forbidden
from farm.records.engine import EngineInfo
from farm.records.engine_state import ACTIVE, DRAINING, RUN_MODEL, EngineUse, Paused, StoredEngine, is_reserved
from farm.records.trajectory import version_number
from farm.store.access import api_keys
from farm.store.access.sealed_secrets import SecretKey
from farm.store.sql.clock import age_of, db_now
from farm.store.sql.schema import EngineRow, EngineUserRow, NamedWeightsRow

engines = EngineRow.__table__
users = EngineUserRow.__table__
named = NamedWeightsRow.__table__

_AS_THEY_ARE = tuple({each.name for each in fields(StoredEngine)} - {"info", "paused_s", "silent_s"})
"""The fields of an engine that its row has in columns of the same names."""
ALIVE_S = 20.0
"""Seconds of silence until a process that calls engines counts as dead; it reports at least every quarter."""
_FAILURE_CHARS = 1000
_SHARED: ColumnElement[bool] = ~engines.c.model.startswith(RUN_MODEL, autoescape=True)
"""The condition that an engine is shared, not reserved by a training run (`is_reserved`)."""


def add(connection: Connection, engine: StoredEngine, secret_key: SecretKey, caller: Caller | None = None) -> None:
    """Add a server. The same URL again makes it active, with the new settings, and probes it again.

    Raises Forbidden if the caller may not change this engine, or has reached its quota of engines.
    """
    url = normal_url(engine.url)
    _check_right(connection, url, caller, engine.model)
    columns = {
        "model": engine.model,
        "key": secret_key.seal(connection, sound_key(engine.key), caller),
        "tokenizer": engine.tokenizer,
        "tool_format": engine.tool_format,
        "state": ACTIVE,
        "info": {},
        "failure": "",
    }
    shared = case((engines.c.added_by == engine.added_by, engine.added_by), else_="")
    if not connection.execute(update(engines).where(engines.c.url == url).values(added_by=shared, **columns)).rowcount:
        registrant = "" if caller is None else caller.name
        if caller is not None and caller.max_engines is not None:
            api_keys.lock(connection, caller.name)
            n = connection.execute(select(func.count()).where(engines.c.registrant == registrant)).scalar_one()
            if n >= caller.max_engines:
                raise Forbidden(f"key {registrant!r} has added {n} engines, which is its quota: remove one first")
        expected = _expected(connection, engine.model) | {"registrant": registrant}
        new = insert(engines).values(url=url, added_at=db_now(), added_by=engine.added_by, **columns, **expected)
        connection.execute(new)


def _expected(connection: Connection, model: str) -> dict[str, str]:
    """Return the weights that engines of a model must have, as last named."""
    row = _of_engines(connection, model)
    if row is None:
        kept = select(named.c.version, named.c.weights_path).where(named.c.model == model)
        row = cast("Row[Any] | None", connection.execute(kept).one_or_none())
    return {} if row is None else {"version": row.version, "weights_path": row.weights_path}


def _of_engines(connection: Connection, model: str) -> Row[Any] | None:
    """Return the newest version, and its path, that was named to the present engines of a model."""
    like = select(engines.c.version, engines.c.weights_path).where(engines.c.model == model, engines.c.version != "")
    values = connection.execute(like.order_by(engines.c.version_order.desc(), engines.c.added_at)).all()
    newest = max(values, key=lambda row: version_number(row.version), default=None)
    return cast("Row[Any] | None", newest)


def newest_version(connection: Connection) -> str:
    """Return the newest version ordered for shared engines; without any, the last one that was named."""
    versions = connection.execute(select(engines.c.version).where(_SHARED)).scalars().all()
    if versions:
        return str(max(versions, key=version_number))
    shared = ~named.c.model.startswith(RUN_MODEL, autoescape=True)
    last = select(named.c.version).where(shared).order_by(named.c.named_at.desc(), named.c.model).limit(1)
    return str(connection.execute(last).scalar_one_or_none() or "")


def drain(connection: Connection, url: str) -> bool:
    """Send no new rollouts to a server; its present ones finish there. False if it is not known."""
    statement = update(engines).where(_is(url)).values(state=DRAINING)
    return connection.execute(statement).rowcount == 1


def _check_right(connection: Connection, url: str, caller: Caller | None, model: str) -> None:
    """Raise Forbidden for a caller with only `submit`, unless this is its own engine of a training run."""
    if caller is None or caller.may(Scope.OPERATE):
        return
    known = connection.execute(select(engines.c.model, engines.c.registrant).where(engines.c.url == url)).one_or_none()
    models = {model, known.model if known is not None else model}
    if not all(map(is_reserved, models)):
        caller.check(Scope.OPERATE)
    if known is not None and known.registrant != caller.name:
        raise Forbidden(f"engine {url} of {known.model} was added by {known.registrant or 'an operator'}")


def remove(connection: Connection, url: str, caller: Caller | None = None) -> bool:
    """Remove a server. False if it was not known. Raises Forbidden if the caller may not change it."""
    model = connection.execute(select(engines.c.model).where(_is(url))).scalar_one_or_none()
    if model is not None:
        _check_right(connection, normal_url(url), caller, model)
    return connection.execute(delete(engines).where(_is(url))).rowcount == 1


def remove_of(connection: Connection, node: str, but: str = "") -> None:
    """Remove the engine that a node was started with, unless its URL is still `but`: that one keeps its orders."""
    kept = normal_url(but) if but else ""
    connection.execute(delete(engines).where(engines.c.added_by == node, engines.c.url != kept))


def clear(connection: Connection, forget_weights: bool = False) -> int:
    """Remove all servers; return how many. Their weights stay named unless `forget_weights`."""
    if forget_weights:
        connection.execute(delete(named))
    return connection.execute(delete(engines)).rowcount


def listing(connection: Connection) -> list[StoredEngine]:
    """Return all servers, oldest first."""
    return [
        StoredEngine(
            **{name: getattr(row, name) for name in _AS_THEY_ARE},
            info=EngineInfo.model_validate(row.info) if row.info else None,
            paused_s=max(0.0, row.paused_s or 0.0),
            silent_s=max(0.0, row.silent_s or 0.0),
        )
        for row in connection.execute(_listing())
    ]


@cache
def _listing() -> Select[Any]:
    age = (db_now() - engines.c.paused_at).label("paused_s")
    silent = (db_now() - engines.c.held_at).label("silent_s")
    return select(engines, age, silent).order_by(engines.c.added_at, engines.c.url)


def set_info(connection: Connection, url: str, info: EngineInfo) -> None:
    """Store the probed capabilities of a server."""
    values = {"info": info.model_dump(mode="json"), "failure": ""}
    connection.execute(update(engines).where(engines.c.url == url).values(**values))


def set_failure(connection: Connection, url: str, failure: str) -> None:
    """Store the reason a server is out; empty if it is back."""
    statement = update(engines).where(engines.c.url == url).values(failure=failure[:_FAILURE_CHARS])
    connection.execute(statement)


def set_paused(
    connection: Connection, paused: Paused, by: str, urls: Collection[str] | None, held: bool = False
) -> None:
    """Order all shared servers, or these, to pause in a way, or with "" to resume. Repeating it is no new order.

    `held` is the first heartbeat of a client that updates their weights; see `hold`.
    """
    since = case((engines.c.paused == "", db_now()), else_=engines.c.paused_at) if paused else None
    values = {"paused": paused, "paused_at": since}
    changed = update(engines).where(engines.c.paused != paused, _among(urls))
    connection.execute(changed.values(n_orders=engines.c.n_orders + 1, **values))
    # a client that repeats the order takes it over from one that may be gone
    owner = {"paused_by": by if paused else "", "held_at": db_now() if paused and held else None}
    connection.execute(update(engines).where(_among(urls)).values(**owner))


def hold(connection: Connection, by: str, urls: Collection[str] | None) -> None:
    """Record a heartbeat of the client that paused these servers for new weights."""
    paused = update(engines).where(engines.c.paused != "", engines.c.paused_by == by, _among(urls))
    connection.execute(paused.values(held_at=db_now()))


def set_version(connection: Connection, version: str, urls: Collection[str] | None, path: str = "") -> None:
    """Order all shared servers, or these, to name their weights `version`. Repeating it is no new order.

    `path` is where servers find these weights; the path of another version is dropped.
    """
    known = path or case((engines.c.version == version, engines.c.weights_path), else_="")
    connection.execute(update(engines).where(_among(urls)).values(weights_path=known))
    outdated = (engines.c.version != version) | (engines.c.engine_version != version)
    changed = update(engines).where(outdated, _among(urls))
    order = engines.c.n_orders + 1
    connection.execute(changed.values(n_orders=order, version=version, version_order=order))
    for model in connection.execute(select(engines.c.model).where(_among(urls)).distinct()).scalars().all():
        _remember(connection, model)


def _remember(connection: Connection, model: str) -> None:
    """Store the weights of a model for engines that are added after the present ones are gone."""
    newest = _of_engines(connection, model)
    if newest is None:
        return
    values = {"version": newest.version, "weights_path": newest.weights_path, "named_at": db_now()}
    if not connection.execute(update(named).where(named.c.model == model).values(**values)).rowcount:
        connection.execute(insert(named).values(model=model, **values))


def carried_out(connection: Connection, url: str, order: int, paused: Paused, version: str) -> None:
    """Record that a server was sent all orders up to this one; no effect if it was removed and added since."""
    values = {"n_done": order, "engine_paused": paused, "engine_version": version}
    counted = engines.c.n_done <= order, engines.c.n_orders >= order
    connection.execute(update(engines).where(engines.c.url == url, *counted).values(**values))


def _is(url: str) -> ColumnElement[bool]:
    return engines.c.url == normal_url(url)


def _among(urls: Collection[str] | None) -> Any:
    """Return the condition that a row has one of these URLs; for None, that it is a shared engine."""
    return _SHARED if urls is None else engines.c.url.in_([normal_url(url) for url in urls])


def report(connection: Connection, owner: str, uses: Mapping[str, EngineUse]) -> None:
    """Record a process's use of the engines, by URL, and its heartbeat."""
    packed = {url: [use.n_orders, use.n_calls, use.n_tokens] for url, use in uses.items()}
    statement = update(users).where(users.c.owner == owner).values(uses=packed, heartbeat_at=db_now())
    if not connection.execute(statement).rowcount:
        connection.execute(insert(users).values(owner=owner, uses=packed, heartbeat_at=db_now()))


def forget_user(connection: Connection, owner: str) -> None:
    """Remove a process that has ended, with its calls in flight."""
    connection.execute(delete(users).where(users.c.owner == owner))


def forget_users(connection: Connection, older_than_s: float) -> None:
    """Remove processes that ended without removing themselves."""
    connection.execute(delete(users).where(age_of(users.c.heartbeat_at) > older_than_s))


def uses(connection: Connection, alive_s: float = ALIVE_S) -> dict[str, dict[str, EngineUse]]:
    """Return owner → URL → use, of the processes that reported in the last `alive_s`."""
    alive = select(users.c.owner, users.c.uses).where(age_of(users.c.heartbeat_at) <= alive_s)
    rows = connection.execute(alive.order_by(users.c.owner))
    return {row.owner: {url: EngineUse(*use) for url, use in row.uses.items()} for row in rows}
