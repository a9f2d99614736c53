"""A broker that crashes, loses data, freezes, fills up, duplicates and forges: every rollout still ends once, scored.

One farm per kind of broker passes all tests, and its workers live to the end.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, and_, select, update

import farm
from farm.records.rollout import FINAL_STATES, Stage
from farm.scheduler.broker import TASKS, celery_app, enqueue, queue_name
from farm.store import migrations
from farm.store.database import Store
from farm.store.placement import StageMessage
from farm.store.rollouts import attempts, rollouts
from testkit.private_server import Missing
from tests.conftest import absent
from tests.services.farms import NOOP, farm_folder, node, until
from tests.services.servers.broker import Broker
from tests.services.servers.line import Line, line_to
from tests.services.servers.rabbitmq import rabbitmq_broker
from tests.services.servers.redis import redis_broker, redis_client
from tests.services.soak import at_length

BROKERS = {"redis": redis_broker, "rabbitmq": rabbitmq_broker}
NODE = "one"
N = 24
SLOW = {"data_source": "noop", "fields": {"seconds": 0.6}}
ENDLESS = {"data_source": "noop", "fields": {"seconds": 3600.0}}
N_DEATHS = {"redis": 2, "rabbitmq": at_length(1, 2)}
"""The number of kills of each broker: a start of RabbitMQ takes five seconds of CPU."""
N_RUN, N_ROOM = 8, 16
"""Slots of the node's run pool, and the total number of rollouts that it takes."""
CUT_S = at_length(3.0, 60.0)
"""Seconds for which the connection to a broker is cut."""
HOURS_S = 5 * 3600.0
_OF_ROLLOUTS = ("submitted_at", "queued_at", "ready_at", "resend_at")
_OF_ATTEMPTS = ("queued_at", "started_at", "finished_at")


@dataclass(frozen=True, slots=True)
class _Here:
    """A farm of one node that reaches its own broker through a proxy."""

    kind: str
    broker: Broker
    line: Line
    store: Store
    client: farm.Farm
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / f"{NODE}.log").read_text(errors="replace")

    def workers(self) -> set[str]:
        """The pids of the node's workers."""
        result = set()
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                with suppress(OSError):
                    ours = str(self.folder).encode() in process.joinpath("environ").read_bytes()
                    if ours and f"@{NODE}".encode() in process.joinpath("cmdline").read_bytes():
                        result.add(process.name)
        return result

    def rollouts_in_state(self, batch_id: str, state: farm.State) -> dict[str, int]:
        """Return the active or queued rollouts of a batch on the node, with the number of messages sent for each."""
        statement = select(rollouts.c.rollout_id, rollouts.c.n_sends).where(
            rollouts.c.batch_id == batch_id, rollouts.c.stage == Stage.RUN.value, rollouts.c.state == state.value
        )
        return dict(self.store.read(lambda connection: connection.execute(statement).tuples().all()))

    def is_idle(self, batch_id: str) -> bool:
        """Return whether no rollout of a batch is active."""
        stages = self.client.status(batch_id).stages.values()
        return not any(stage[farm.State.ACTIVE] for stage in stages)


@pytest.fixture(scope="module", params=BROKERS)
def here(request: pytest.FixtureRequest) -> Iterator[_Here]:
    with ExitStack() as stack:
        folder = stack.enter_context(farm_folder())
        try:
            broker = stack.enter_context(BROKERS[request.param]())
        except Missing as missing:
            absent(str(missing))
        store_url = f"sqlite:///{folder / 'farm.db'}"
        store = Store(store_url)
        stack.callback(store.close)
        migrations.migrate(store)
        line = stack.enter_context(line_to(broker.server))
        url = broker.url_at(line.port)
        stack.enter_context(node(folder, NODE, store_url, url))
        client = stack.enter_context(farm.connect(store_url, broker_url=url))
        result = _Here(request.param, broker, line, store, client, folder)
        until(lambda: len(result.workers()) == 3, lambda: f"there are three workers; {result.log[-2000:]}", 120)
        result.client.collect(result.client.submit({"instances": [NOOP]}), timeout_s=600)
        yield result


@contextmanager
def running_batch(here: _Here) -> Iterator[str]:
    """Run a batch around the block, and afterwards another on what is left."""
    workers = here.workers()
    batch_id = here.client.submit({"instances": [SLOW] * N, "max_attempts": 5})
    until(lambda: here.client.status(batch_id).n_finished >= 3, "some have ended", 120)
    yield batch_id
    every_rollout_ended_once(here, batch_id)
    # more than the slots of any pool, so that all pools are seen to take messages
    every_rollout_ended_once(here, here.client.submit({"instances": [NOOP] * 10}))
    assert here.workers() == workers, here.log[-4000:]
    assert "raised unexpected" not in here.log, "a stage is none of the broker's faults"


def every_rollout_ended_once(here: _Here, batch_id: str) -> None:
    rollouts = here.client.collect(batch_id, timeout_s=600)
    ended = [rollout for rollout in rollouts if rollout.state is farm.State.COMPLETED and rollout.reward is not None]
    assert len(ended) == len(rollouts), Counter(str(rollout.failure) for rollout in rollouts)
    assert sorted(rollout.cursor for rollout in rollouts) == list(range(1, len(rollouts) + 1))
    assert all(len(here.client.rewards(rollout.rollout_id)) == 1 for rollout in rollouts)


@pytest.mark.soak
def test_batch_survives_broker_crashes(here: _Here) -> None:
    with running_batch(here) as batch_id:
        for _ in range(N_DEATHS[here.kind]):
            here.broker.kill()
            until(lambda: here.is_idle(batch_id), "nothing goes on without a broker", 120)
            here.broker.start()
            n_finished = here.client.status(batch_id).n_finished
            more = min(N, n_finished + 1)
            until(lambda more=more: here.client.status(batch_id).n_finished >= more, "it goes on", 120)  # type: ignore[misc]


def test_batch_survives_a_frozen_broker(here: _Here) -> None:
    with running_batch(here) as batch_id:
        here.broker.freeze()
        until(lambda: here.is_idle(batch_id), "nothing goes on without a broker", 120)
        here.broker.thaw()


def test_batch_survives_a_broker_out_of_memory(here: _Here) -> None:
    with running_batch(here) as batch_id:
        here.broker.full(True)
        until(lambda: here.is_idle(batch_id), "nothing goes on without a broker", 120)
        here.broker.full(False)


def test_batch_survives_dropped_broker_connections(here: _Here) -> None:
    with running_batch(here) as batch_id:
        for n_finished in (8, 13, 18):
            here.broker.cut()
            until(lambda n=n_finished: here.client.status(batch_id).n_finished >= n, "it goes on", 120)  # type: ignore[misc]


@pytest.mark.soak
def test_batch_survives_refused_broker_connections(here: _Here) -> None:
    cut_off(here, here.line.refuse)


@pytest.mark.soak
def test_batch_survives_blackholed_broker_connections(here: _Here) -> None:
    message = StageMessage("b.0.0", 1, Stage.INIT, "nowhere")
    with celery_app(here.broker.url_at(here.line.port), "ringer") as app:
        assert enqueue(app, [message])
        cut_off(here, here.line.drop_data)
        # its connection is dead by now, which a client that only sends does not notice
        until(lambda: enqueue(app, [message]) and n_queued_messages(here, "nowhere") > 1, "a message arrives", 30)


def n_queued_messages(here: _Here, node: str) -> int:
    """Return the number of messages queued for the workers of a node without workers."""
    with celery_app(here.broker.url, "counter") as app, app.connection_for_read() as connection:
        queue = app.amqp.queues[queue_name(Stage.INIT, node)]
        return int(queue(connection).queue_declare(passive=True).message_count)


def cut_off(here: _Here, cut: Callable[[], None]) -> None:
    """Cut the connection for a while during a batch, which loses nothing, and print how soon it continued."""
    with running_batch(here) as batch_id:
        cut_at = time.monotonic()
        cut()
        until(lambda: here.is_idle(batch_id), "nothing goes on without a broker", 120)
        # this waits for no state: it is the length of the cut
        time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))
        n_finished = here.client.status(batch_id).n_finished
        here.line.restore()
        restored_at = time.monotonic()
        until(lambda: here.client.status(batch_id).n_finished > n_finished, "it goes on", 120)
        print(f"cut off for {restored_at - cut_at:.1f} s, it went on after {time.monotonic() - restored_at:.2f} s")
    assert {rollout.attempt for rollout in here.client.rollouts(batch_id)} == {1}


def test_duplicate_messages_run_no_stage_twice(here: _Here) -> None:
    with celery_app(here.broker.url, "doubler") as app, running_batch(here) as batch_id:
        while open_ones := [rollout for rollout in here.client.rollouts(batch_id) if rollout.state not in FINAL_STATES]:
            stage_messages = [
                StageMessage(each.rollout_id, each.attempt, stage, NODE) for each in open_ones for stage in Stage
            ]
            assert enqueue(app, stage_messages) == len(stage_messages)


def test_lost_messages_are_sent_again(here: _Here) -> None:
    stolen: list[Any] = []
    stop = threading.Event()

    def steal() -> None:
        app = celery_app(here.broker.url, "thief")
        queues = [app.amqp.queues[queue_name(stage, NODE)] for stage in Stage]
        with (
            app.connection_for_read() as connection,
            connection.channel() as channel,
            app.amqp.Consumer(channel, queues, on_message=stolen.append, no_ack=True, prefetch_count=1),
        ):
            while not stop.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.2)

    thief = threading.Thread(target=steal)
    thief.start()
    try:
        with running_batch(here):
            until(lambda: len(stolen) >= N // 3, "many are stolen", 120)
            stop.set()
            thief.join()
    finally:
        stop.set()
        thief.join()


RING = {"task": TASKS[Stage.INIT], "id": "poison"}
EVIL = b"cposix\nsystem\n(S'touch %s'\ntR."  # a pickle that runs a program when it is loaded
POISON: dict[str, tuple[Any, ...]] = {
    "no JSON": (b"{]",),
    "no UTF-8": (b"\xff\xfe\x00",),
    "nothing": (b"",),
    "other JSON": (b'{"a": 1}',),
    "deep JSON": (b"[" * 50_000,),
    "long": (b'[["' + b"x" * 10_000_000 + b'", 1], {}, {}]',),
    "few arguments": (b"[[1], {}, {}]",),
    "many arguments": (b'[["a", 1, 2], {}, {}]',),
    "other arguments": (b'[["a", "1"], {}, {}]',),
    "named arguments": (b'[["a", 1], {"force": 1}, {}]',),
    "no text": (b'[["a\\u0000", 1], {}, {}]',),
    "half a character": (b'[["\\ud800", 1], {}, {}]',),
    "a callback": (b'[["a", 1], {}, {"callbacks": [{"task": "x"}]}]',),
    "another chain": (b'[["a", 1], {}, {"chain": [{"task": "x"}]}]',),
    "pickle": (EVIL, "application/x-python-serialize"),
    "pickle called JSON": (EVIL,),
    "YAML": (b"- a", "application/x-yaml"),
    "not said what": (b'[["a", 1], {}, {}]', None),
    "no headers": (b'[["a", 1], {}, {}]', "application/json", {}),
    "no id": (b'[["a", 1], {}, {}]', "application/json", {"task": TASKS[Stage.INIT]}),
    "unknown task": (b'[["a", 1], {}, {}]', "application/json", {"task": "os.system", "id": "poison"}),
    "no task's name": (b'[["a", 1], {}, {}]', "application/json", {"task": [1], "id": "poison"}),
    "no time": (b'[["a", 1], {}, {}]', "application/json", RING | {"expires": "never"}),
    "no limits": (b'[["a", 1], {}, {}]', "application/json", RING | {"timelimit": 5}),
    "later": (b'[["a", 1], {}, {}]', "application/json", RING | {"eta": "9999-01-01T00:00:00"}),
    "not compressed": (b'[["a", 1], {}, {}]', "application/json", RING | {"compression": "application/x-gzip"}),
}
POISON_OF_REDIS = [
    b"rubbish",
    b"\xff\xfe\x00",
    b"",
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b"[" * 50_000,
    b'{"body": "e30="}',
    b'{"properties": null}',
    b'{"properties": {"delivery_tag": []}}',
    b'{"body": "%%%", "properties": {"delivery_tag": "1", "body_encoding": "base64"}, "headers": []}',
    b'{"body": "e30=", "properties": {"delivery_tag": "1", "body_encoding": "rot13"}, "headers": {}}',
    b'{"__type__": "uuid", "__value__": 3}',
]


def dropped(log: str) -> Counter[str]:
    """Return the number of messages that each worker dropped."""
    return Counter(re.findall(r"(\w+/\w+) \S+: Dropped", log))


def test_invalid_messages_are_dropped_with_one_log_line_each(here: _Here) -> None:
    touched = here.folder / "touched"
    app = celery_app(here.broker.url, "poisoner")
    if here.kind == "rabbitmq":
        # a quorum queue loses the last unconfirmed messages when their sender disconnects at once
        app.conf.broker_transport_options = app.conf.broker_transport_options | {"confirm_publish": True}
    n_lines = here.log.count("\n")
    with app.connection_for_write() as connection, connection.channel() as channel:
        producer = app.amqp.Producer(channel)
        for stage in Stage:
            for body, kind, headers in (
                (*poison, *("application/json", RING)[len(poison) - 1 :]) for poison in POISON.values()
            ):
                evil = body.replace(b"%s", str(touched).encode())
                where = {"exchange": "", "routing_key": queue_name(stage, NODE)}
                producer.publish(evil, content_type=kind, content_encoding="utf-8", headers=headers, **where)
    n = len(Stage) * len(POISON)
    if here.broker.url.startswith("redis"):
        with redis_client(here.broker.url) as client:
            for stage in Stage:
                client.lpush(queue_name(stage, NODE), *POISON_OF_REDIS)
        n += len(Stage) * len(POISON_OF_REDIS)
    with running_batch(here):
        until(lambda: here.log.count("Dropped") >= n, lambda: f"all {n} are dropped, not {dropped(here.log)}", 120)
    # a connection that an earlier test cut may be noticed only now
    new = here.log.splitlines()[n_lines:]
    lines = [line for line in new if " INFO " not in line and not line.endswith("will be sent again")]
    assert len(lines) == n, "\n".join(line[:300] for line in lines)
    assert max(map(len, lines)) < 1000
    assert not touched.exists()


def test_messages_of_unknown_or_ended_rollouts_are_ignored(here: _Here) -> None:
    log = here.log
    batch_id = here.client.submit({"instances": [NOOP]})
    every_rollout_ended_once(here, batch_id)
    ghosts = [
        f"{batch_id}.0.0",
        f"{batch_id}.7.0",
        "ghost.0.0",
        "",
        "x" * 2000,
        "'; DROP TABLE rollouts; --",
        "\U0001f47b",
    ]
    with celery_app(here.broker.url, "ghosts") as app:
        stage_messages = [
            StageMessage(ghost, attempt, stage, NODE)
            for ghost in ghosts
            for attempt in (-1, 0, 7, 2**62)
            for stage in Stage
        ]
        assert enqueue(app, stage_messages) == len(stage_messages)
    with running_batch(here):
        pass
    logged = here.log.removeprefix(log)
    assert not [word for word in ("ghost", "DROP TABLE", "Dropped", "internal error") if word in logged], logged[-4000:]


def test_long_queue_wait_is_not_taken_for_message_loss(here: _Here) -> None:
    """All slots of the farm are taken. A message lost then is detected, which shows that the dispatcher checks."""
    busy = here.client.submit({"instances": [ENDLESS] * N_RUN, "limits": {"run_s": 7200}})
    try:
        until(lambda: len(here.rollouts_in_state(busy, farm.State.ACTIVE)) == N_RUN, "all slots are taken", 120)
        waiting = here.client.submit({"instances": [NOOP] * N})
        until(
            lambda: len(here.rollouts_in_state(waiting, farm.State.QUEUED)) == N_ROOM - N_RUN,
            "some wait for a slot",
            120,
        )
        lost = here.client.submit({"instances": [NOOP] * 3})
        n_sends = here.rollouts_in_state(waiting, farm.State.QUEUED)
        for k in range(3):
            one = f"{lost}.{k}.0"
            here.store.write(partial(age_queued_rollouts, lost=one))
            until(lambda one=one: one in here.rollouts_in_state(lost, farm.State.QUEUED), "what is lost is found", 120)  # type: ignore[misc]
            assert here.rollouts_in_state(waiting, farm.State.QUEUED) == n_sends, "and what waits is let wait"
            assert not any(here.client.violations(batch_id) for batch_id in (busy, waiting, lost))
    finally:
        here.client.cancel(busy)
    for batch_id in (waiting, lost):
        every_rollout_ended_once(here, batch_id)
        assert {rollout.attempt for rollout in here.client.rollouts(batch_id)} == {1}
        assert here.client.violations(batch_id) == []


def age_queued_rollouts(connection: Connection, lost: str) -> None:
    """Age all queued rollouts, with and without a node, and one on a node whose message was lost."""
    queued = (rollouts.c.finish_seq.is_(None), rollouts.c.state == farm.State.QUEUED.value)
    for table, where, names in (
        (attempts, attempts.c.rollout_id.in_(select(rollouts.c.rollout_id).where(*queued)), _OF_ATTEMPTS),
        (rollouts, and_(*queued), _OF_ROLLOUTS),
    ):
        connection.execute(update(table).where(where).values({name: table.c[name] - HOURS_S for name in names}))
    connection.execute(update(rollouts).where(rollouts.c.rollout_id == lost).values(node=NODE, n_sends=1))
