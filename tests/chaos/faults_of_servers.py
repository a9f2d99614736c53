"""Faults of the farm's servers: its database, its broker, its engines."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx2
from celery import Celery
from sqlalchemy import select

from farm.records.rollout import Stage
from farm.scheduler.broker import celery_app, enqueue, queue_name
from farm.store.database import Store
from farm.store.leader import leaders
from farm.store.placement import StageMessage
from farm.store.rollouts import rollouts
from tests.chaos.parts import Part
from tests.chaos.servers import BrokerUnderTest, Postgres
from tests.chaos.strikes import NotNow, Scene, Strike, kind
from tests.services.servers.line import Line
from tests.services.servers.redis import redis_client

_ENGINE_FAULTS = ("500", "502", "429", "503", "close", "reset", "hang", "slow", "garbage")
_GARBAGE: tuple[bytes, ...] = (
    b"not json at all",
    b"\xff\xfe\x00\x01",
    b"{}",
    b"[]",
    b'{"body": 7, "headers": null, "properties": {}}',
    b'{"body": "bm90IGpzb24=", "content-encoding": "utf-8", "content-type": "application/json", "headers": '
    b'{"task": "rollout.run_agent", "id": "x"}, "properties": {"body_encoding": "base64", "delivery_tag": "x", '
    b'"delivery_info": {"exchange": "", "routing_key": "x"}}}',
)

_WRONG: tuple[tuple[str, list[Any]], ...] = (
    ("rollout.no_such_task", []),
    ("rollout.run_agent", []),
    ("rollout.init_sandbox", [{"not": "an id"}, "seven"]),
    ("rollout.evaluate", ["no-such-rollout", 1, 2]),
)


def _postgres(scene: Scene) -> Postgres:
    postgres = scene.parts.postgres
    if postgres is None or not postgres.running:
        raise NotNow("a Postgres that is up")
    return postgres


@kind(1, needs_postgres=True, needs_store=True)
def restart_postgres(scene: Scene) -> Strike:
    """Restart it at once, or after a while."""
    postgres = _postgres(scene)
    postgres.crash()
    away_s = scene.chance.choice((0.0, 0.0, 2.0, 5.0))
    return Strike(f"away for {away_s:g} s", undo=partial(_up, postgres), after_s=away_s)


@kind(2, needs_postgres=True, needs_store=True)
def cut_postgres_sessions(scene: Scene) -> Strike:
    return Strike(f"{_postgres(scene).cut_sessions()} sessions")


@kind(2, needs_postgres=True, needs_store=True)
def silence_node(scene: Scene) -> Strike:
    """Drop all traffic between a node and the database for a while, without an error to either side."""
    node = scene.chance.choice([node for node in scene.parts.nodes if node.running] or [None])
    line = scene.parts.lines.get(node.name) if node is not None else None
    if node is None or line is None:
        raise NotNow("a node that is up")
    line.drop_data()
    for_s = scene.chance.uniform(5.0, 30.0)
    return Strike(f"{node.name} for {for_s:.0f} s", undo=partial(_restore_network, line), after_s=for_s)


def _restore_network(line: Line) -> None:
    """Restore the network: it resets connections that it does not know."""
    line.refuse()
    line.restore()


@kind(1, needs_postgres=True, needs_store=True)
def jump_clock(scene: Scene) -> Strike:
    """Set the database's clock wrong for a while, ahead or behind, and then right again."""
    _postgres(scene)
    clock = scene.parts.clock
    assert clock is not None
    off_s = scene.chance.choice((-3600.0, -60.0, 60.0, 3600.0))
    for_s = scene.chance.uniform(5.0, 20.0)
    clock.set(off_s)
    return Strike(f"by {off_s:+.0f} s for {for_s:.0f} s", undo=partial(clock.set, 0.0), after_s=for_s)


@kind(1, needs_postgres=True, needs_store=True)
def silent_transaction(scene: Scene) -> Strike:
    """Stop a client in the middle of a transaction, with locked rows that others need."""
    connection = _postgres_store(scene).engine.connect()
    transaction = connection.begin()
    live = select(rollouts.c.rollout_id).where(rollouts.c.finish_seq.is_(None)).limit(64)
    n = len(connection.execute(live.with_for_update(skip_locked=True)).all())
    connection.execute(select(leaders.c.role).with_for_update(skip_locked=True))

    def forgotten() -> None:
        with contextlib.suppress(Exception):
            transaction.rollback()
        connection.invalidate()
        connection.close()

    return Strike(f"{n} rows", undo=forgotten, after_s=60.0)


def _postgres_store(scene: Scene) -> Store:
    _postgres(scene)
    return scene.parts.store


def _up(server: BrokerUnderTest | Postgres) -> None:
    if not server.running:
        server.start()


def _broker(scene: Scene) -> BrokerUnderTest:
    broker = scene.parts.broker
    if not broker.running or broker.frozen:
        raise NotNow("a broker that is up")
    return broker


@kind(2)
def kill_broker(scene: Scene) -> Strike:
    """Kill it; a Redis comes back empty."""
    broker = _broker(scene)
    broker.kill()
    away_s = scene.chance.choice((0.0, 1.0, 3.0, 8.0))
    return Strike(f"away for {away_s:g} s", undo=partial(_up, broker), after_s=away_s)


@kind(1)
def freeze_broker(scene: Scene) -> Strike:
    broker = _broker(scene)
    broker.freeze()
    for_s = scene.chance.uniform(1.0, 12.0)
    return Strike(f"for {for_s:.1f} s", undo=partial(_thaw, broker), after_s=for_s)


def _thaw(broker: BrokerUnderTest) -> None:
    if broker.running and broker.frozen:
        broker.thaw()


@kind(1)
def fill_broker(scene: Scene) -> Strike:
    """Take its memory: every write is refused, or waits."""
    broker = _broker(scene)
    broker.fill(True)
    for_s = scene.chance.uniform(1.0, 8.0)
    return Strike(f"for {for_s:.1f} s", undo=partial(_roomy, broker), after_s=for_s)


def _roomy(broker: BrokerUnderTest) -> None:
    """Undo it; a restarted broker has memory."""
    _thaw(broker)
    if broker.running and broker.full:
        broker.fill(False)


@kind(2)
def cut_broker_connections(scene: Scene) -> Strike:
    _broker(scene).cut()
    return Strike("all of them")


def _queues(scene: Scene) -> list[str]:
    return [queue_name(stage, node.name) for node in scene.parts.nodes for stage in Stage]


@contextmanager
def _speaking(scene: Scene) -> Iterator[Celery]:
    app = celery_app(_broker(scene).url, "chaos")
    try:
        yield app
    finally:
        app.close()


@kind(2)
def drop_messages(scene: Scene) -> Strike:
    """Drop all queued messages; sometimes also the queue bindings of Redis."""
    with _speaking(scene) as app, app.connection_for_write() as connection:
        n = sum(_purged(connection, name) for name in _queues(scene))
    if scene.parts.broker.kind == "redis" and scene.chance.random() < 0.3:
        with redis_client(scene.parts.broker.url) as client:
            for bindings in client.keys("_kombu.binding.*"):
                client.delete(bindings)
    return Strike(f"{n} messages")


def _purged(connection: Any, queue: str) -> int:
    """Purge a queue and return the number of its messages; the channel closes if there is no such queue."""
    try:
        with connection.channel() as channel:
            return int(channel.queue_purge(queue) or 0)
    except connection.channel_errors:
        return 0


@kind(2, needs_store=True)
def double_messages(scene: Scene) -> Strike:
    """Send two messages for each of many rollouts in every state, to their nodes and to others."""
    columns = (rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.stage, rollouts.c.node)
    newest = select(*columns).order_by(rollouts.c.submitted_at.desc()).limit(60)
    rows = scene.parts.store.read(lambda connection: connection.execute(newest).all())
    other = scene.chance.choice(scene.parts.nodes).name
    stage_messages = [
        StageMessage(row.rollout_id, row.attempt, Stage(row.stage), row.node or other) for row in rows for _ in range(2)
    ]
    with _speaking(scene) as app:
        return Strike(f"{enqueue(app, stage_messages)} messages")


@kind(1, needs_redis=True)
def copy_queues(scene: Scene) -> Strike:
    """Duplicate every waiting message."""
    n = 0
    broker = _broker(scene)
    with redis_client(broker.url) as client:
        for name in _queues(scene):
            for message in client.lrange(name, 0, -1):
                n += 1
                client.rpush(name, message)
    return Strike(f"{n} messages")


@kind(2)
def send_garbage(scene: Scene) -> Strike:
    """Send messages with unknown tasks or invalid arguments; to Redis also data that is no message."""
    queue = scene.chance.choice(_queues(scene))
    name, args = scene.chance.choice(_WRONG)
    with _speaking(scene) as app:
        app.send_task(name, args=args, queue=queue)
        with app.connection_for_write() as connection:
            connection.Producer().publish(
                scene.chance.choice(_GARBAGE),
                routing_key=queue,
                content_type="application/json",
                content_encoding="utf-8",
            )
    if scene.parts.broker.kind == "redis":
        with redis_client(scene.parts.broker.url) as client:
            client.lpush(queue, scene.chance.choice(_GARBAGE))
    return Strike(f"{queue}: {name}{json.dumps(args)}")


def _engine(scene: Scene) -> tuple[Part, str]:
    up = [each for each in zip(scene.parts.engines, scene.parts.urls, strict=True) if each[0].running]
    if not up:
        raise NotNow("an engine that is up")
    return scene.chance.choice(up)


@kind(2)
def kill_engine(scene: Scene) -> Strike:
    engine, _ = _engine(scene)
    engine.strike(signal.SIGKILL, scene.chance.uniform(0.0, 6.0))
    return Strike(f"{engine.name}/{engine.pid}")


@kind(4)
def break_engine(scene: Scene) -> Strike:
    """For a while, answer some calls, or all, with an error, garbage, half an answer, or never."""
    engine, url = _engine(scene)
    fault = scene.chance.choice(_ENGINE_FAULTS)
    share = scene.chance.choice((0.3, 1.0))
    for_s = scene.chance.uniform(1.0, 8.0)
    try:
        httpx2.post(f"{url}/double/faults", json={"rates": {fault: share}}, timeout=2).raise_for_status()
    except httpx2.HTTPError as error:
        raise NotNow(f"an engine that accepts faults: {error}") from error
    target = f"{engine.name}: {fault} of {share:g} of its calls for {for_s:.1f} s"
    return Strike(target, undo=partial(restore_engine, url), after_s=for_s)


def restore_engine(url: str) -> None:
    """Undo it; a killed engine has lost its faults."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            httpx2.post(f"{url}/double/faults", json={"clear": True}, timeout=2).raise_for_status()
            return
        except httpx2.ConnectError:
            return
        except httpx2.HTTPError:
            continue
