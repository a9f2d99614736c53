"""The LLM servers that the farm may use, and what they are ordered to do: pause, resume, name their weights.

A row says what was ordered (`paused`, `version`) and what the engine was told last (`engine_paused`,
`engine_version`). Every order is counted in `n_orders`; whoever carries it out writes that number to `n_done`. So a
client that waits for an order knows when it took effect, and a process that dies half way leaves work, not a riddle.
An engine that was out when its weights were named is not told of them with a later order: it does not have them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

from sqlalchemy import Connection, Row, Table, case, delete, insert, select, update

from farm.engine import EngineInfo, PauseMode
from farm.errors import InvalidRequest
from farm.store.clock import db_now
from farm.store.tables import EngineRow, EngineUserRow

engines = cast(Table, EngineRow.__table__)
users = cast(Table, EngineUserRow.__table__)

ACTIVE = "active"
DRAINING = "draining"
Paused: TypeAlias = PauseMode | Literal[""]
_FAILURE_CHARS = 1000
_KEY_CHARS = 500
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Engine:
    """An LLM server. `url` ends in /v1; an empty `model` is the first that it lists.

    `info` is None until a node has asked it what it can do. `failure` says why it is out, empty if it is not.
    `paused_s` is how long it has been ordered to pause.
    """

    url: str
    model: str = ""
    key: str = field(default="none", repr=False)
    added_by: str = ""
    """The node that was started with it and takes it along when it ends; empty if anybody else has added it, too."""
    tokenizer: str = ""
    tool_format: str = ""
    state: str = ACTIVE
    info: EngineInfo | None = None
    paused: Paused = ""
    paused_by: str = ""
    paused_s: float = field(default=0.0, compare=False)
    version: str = ""
    version_order: int = 0
    n_orders: int = 0
    n_done: int = 0
    engine_paused: Paused = ""
    engine_version: str = ""
    failure: str = ""


def normal_url(url: str) -> str:
    """The one way in which an engine's address is written. Raises InvalidRequest if it is none."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise InvalidRequest("that is no address such as http://HOST:8000/v1", field="url") from None
    if "@" in parts.netloc:
        # without showing it: everybody is shown an address
        raise InvalidRequest("an address must not hold a password: give the engine's API key", field="url")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequest(f"{url!r} is no address such as http://HOST:8000/v1", field="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/') or '/v1'}"


def sound_key(key: str) -> str:
    """The key, "none" for none. Raises InvalidRequest, which does not show it, if no header can hold it."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > _KEY_CHARS:
        wanted = f"an API key is printable ASCII without blanks, {_KEY_CHARS} characters at most; is it the right file?"
        raise InvalidRequest(wanted, field="key")
    return key or "none"


def add(connection: Connection, engine: Engine) -> None:
    """Use a server from now on. The same URL again makes it active, with what is said of it now, and asks it anew."""
    url = normal_url(engine.url)
    told = {
        "model": engine.model,
        "key": sound_key(engine.key),
        "tokenizer": engine.tokenizer,
        "tool_format": engine.tool_format,
        "state": ACTIVE,
        "info": {},
        "failure": "",
    }
    shared = case((engines.c.added_by == engine.added_by, engine.added_by), else_="")
    if not connection.execute(update(engines).where(engines.c.url == url).values(added_by=shared, **told)).rowcount:
        new = insert(engines).values(url=url, added_at=db_now(), added_by=engine.added_by, **told)
        connection.execute(new)


def drain(connection: Connection, url: str) -> bool:
    """Send no new rollouts to a server; those that play there finish there. False if it is not known."""
    statement = update(engines).where(_is(url)).values(state=DRAINING)
    return connection.execute(statement).rowcount == 1


def remove(connection: Connection, url: str) -> bool:
    """Use a server no more. False if it was not known."""
    return connection.execute(delete(engines).where(_is(url))).rowcount == 1


def remove_of(connection: Connection, node: str, but: str = "") -> None:
    """Use no more what a node was started with, other than `but`, a URL that it still brings: that keeps its orders."""
    kept = normal_url(but) if but else ""
    connection.execute(delete(engines).where(engines.c.added_by == node, engines.c.url != kept))


def clear(connection: Connection) -> int:
    """Use none of the servers any more; how many there were."""
    return connection.execute(delete(engines)).rowcount


def listing(connection: Connection) -> list[Engine]:
    """All servers, oldest first."""
    age = (db_now() - engines.c.paused_at).label("paused_s")
    statement = select(engines, age).order_by(engines.c.added_at, engines.c.url)
    return [_engine(row) for row in connection.execute(statement)]


def _engine(row: Row[Any]) -> Engine:
    return Engine(
        url=row.url,
        model=row.model,
        key=row.key,
        added_by=row.added_by,
        tokenizer=row.tokenizer,
        tool_format=row.tool_format,
        state=row.state,
        info=EngineInfo.model_validate(row.info) if row.info else None,
        paused=row.paused,
        paused_by=row.paused_by,
        paused_s=max(0.0, row.paused_s or 0.0),
        version=row.version,
        version_order=row.version_order,
        n_orders=row.n_orders,
        n_done=row.n_done,
        engine_paused=row.engine_paused,
        engine_version=row.engine_version,
        failure=row.failure,
    )


def set_info(connection: Connection, url: str, info: EngineInfo) -> None:
    """Write down what a server can do."""
    values = {"info": info.model_dump(mode="json"), "failure": ""}
    connection.execute(update(engines).where(engines.c.url == url).values(**values))


def set_failure(connection: Connection, url: str, failure: str) -> None:
    """Write down why a server is out; empty if it is back."""
    statement = update(engines).where(engines.c.url == url).values(failure=failure[:_FAILURE_CHARS])
    connection.execute(statement)


def set_paused(connection: Connection, paused: Paused, by: str, urls: Collection[str] | None) -> None:
    """Order all servers, or these, to pause in a way, or with "" to go on. Repeating it orders nothing new."""
    since = case((engines.c.paused == "", db_now()), else_=engines.c.paused_at) if paused else None
    values = {"paused": paused, "paused_by": by if paused else "", "paused_at": since}
    changed = update(engines).where(engines.c.paused != paused, _among(urls))
    connection.execute(changed.values(n_orders=engines.c.n_orders + 1, **values))


def set_version(connection: Connection, version: str, urls: Collection[str] | None) -> None:
    """Order all servers, or these, to call their weights this. Repeating it to those that do orders nothing new."""
    untold = (engines.c.version != version) | (engines.c.engine_version != version)
    changed = update(engines).where(untold, _among(urls))
    order = engines.c.n_orders + 1
    connection.execute(changed.values(n_orders=order, version=version, version_order=order))


def carried_out(connection: Connection, url: str, order: int, paused: Paused, version: str) -> None:
    """Say that a server was told all orders up to this one; of no account if it was removed and added since."""
    values = {"n_done": order, "engine_paused": paused, "engine_version": version}
    counted = engines.c.n_done <= order, engines.c.n_orders >= order
    connection.execute(update(engines).where(engines.c.url == url, *counted).values(**values))


def _is(url: str) -> Any:
    """However it is written; or as it is listed, which an older farm may have written otherwise."""
    return engines.c.url.in_({normal_url(url), url})


def _among(urls: Collection[str] | None) -> Any:
    return True if urls is None else engines.c.url.in_([normal_url(url) for url in urls])


@dataclass(frozen=True, slots=True)
class Use:
    """What a process has in flight on an engine, and the last order for that engine which it follows."""

    n_orders: int
    n_calls: int = 0
    n_tokens: int = 0


def report(connection: Connection, owner: str, uses: Mapping[str, Use]) -> None:
    """Say what a process does with the engines, by URL, and that it lives."""
    packed = {url: [use.n_orders, use.n_calls, use.n_tokens] for url, use in uses.items()}
    mine = update(users).where(users.c.owner == owner).values(uses=packed, heartbeat_at=db_now())
    if not connection.execute(mine).rowcount:
        connection.execute(insert(users).values(owner=owner, uses=packed, heartbeat_at=db_now()))


def forget_user(connection: Connection, owner: str) -> None:
    """A process is gone: it has nothing in flight any more."""
    connection.execute(delete(users).where(users.c.owner == owner))


def forget_users(connection: Connection, older_than_s: float) -> None:
    """Forget processes that went without a word."""
    connection.execute(delete(users).where(users.c.heartbeat_at < db_now() - older_than_s))


def uses(connection: Connection, alive_s: float) -> dict[str, dict[str, Use]]:
    """Owner → URL → use, of the processes that were heard of in the last `alive_s`."""
    alive = select(users.c.owner, users.c.uses).where(users.c.heartbeat_at >= db_now() - alive_s)
    found = connection.execute(alive.order_by(users.c.owner))
    return {row.owner: {url: Use(*use) for url, use in row.uses.items()} for row in found}
