"""Names of queues and Celery tasks, and the sending of messages: the only file of `farm` that imports Celery.

A message only names a rollout and its attempt; the database says what to do. So a lost message is sent again, and a
duplicate does nothing. The broker may be Redis or RabbitMQ, and all differences between them are handled here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.app.amqp import AMQP, Queues
from kombu.connection import Connection, ConnectionPool
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from kombu.pools import ProducerPool
from kombu.utils.uuid import uuid

from farm.errors import BrokerUnavailable, InvalidRequest
from farm.ids import batch_of
from farm.notifications import Signals, redis_client, redis_refusal
from farm.records.rollout import Stage
from farm.store.placement import StageMessage
from farm.store.reports.stage_ends import AttemptStage

log = logging.getLogger(__name__)

TASKS = {
    Stage.INIT: "rollout.init_sandbox",
    Stage.RUN: "rollout.run_agent",
    Stage.EVAL: "rollout.evaluate",
}
_STAGES = list(Stage)
_SHOWN_ARGUMENTS = re.compile(
    rf"\(rollout=(?P<rollout_id>\S+), attempt=(?P<attempt>\d+), batch=\S+, stage=(?P<stage>{'|'.join(_STAGES)})\)"
)
_QUEUE_EXPIRES_S = 7200
"""Seconds until a queue without consumers is removed with its messages, such as that of a removed node.

Messages have no expiry of their own: a late one starts nothing, and Celery would parse a date in each.
"""
_AT_A_TIME = 100
_ACCESS_REFUSED, _NOT_ALLOWED = 403, 530
_ORIGIN = socket.gethostname()
_TRUSTED_S = 10.0
_ANSWERS_S = 1.0

SETTINGS: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # a temporary refusal, such as by a Redis out of memory, is retried as if the broker were unavailable
    "broker_channel_error_retry": True,
    # heartbeats let consumers notice a RabbitMQ that vanished without closing connections; Redis has its own check
    "broker_heartbeat": 10,
    "broker_pool_limit": 8,
    "broker_pool_acquire_timeout": 10,
    # a failed publish is not repeated: the row stays queued and its message is sent again
    "task_publish_retry": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    # no worker serves this queue: a task sent without one of our queues shows up there instead of running somewhere
    "task_default_queue": "unrouted",
    "task_send_sent_event": False,
    "timezone": "UTC",
}
REDIS = {
    # without emulated acknowledgements there is no visibility timeout, no redelivery on reconnect, and three times the
    # throughput; the broker then delivers at most once, which suffices
    "ack_emulation": False,
    # one list per queue instead of four
    "priority_steps": [0],
    "socket_timeout": 5,
    "socket_connect_timeout": 2,
    "socket_keepalive": True,
    "health_check_interval": 10,
}
RABBITMQ = {
    # a frozen server must not block the dispatcher; publishes are rarely confirmed, as the store shows lost messages
    "read_timeout": 5,
    "write_timeout": 5,
}


def queue_name(stage: Stage, node: str) -> str:
    """Return the name of the queue of one node's pool for one stage."""
    return f"{stage}.{node}"


def is_rabbitmq(broker_url: str) -> bool:
    """Return whether an address is that of a RabbitMQ: `amqp://`, or `amqps://` for TLS."""
    return broker_url.startswith(("amqp://", "amqps://", "pyamqp://"))


_NAMELESS = Exchange("")  # type: ignore[no-untyped-call]


class _Queues(Queues):  # type: ignore[misc]
    """Queues, declared the same way by workers and senders.

    The only exchange is the nameless default one: there are no bindings that a Redis without persistence could lose
    while it is down, and none that remain when a node and its queues are gone. `x-queue-type` is for RabbitMQ, whose
    quorum queues survive the loss of a server; Redis ignores it.
    """

    def new_missing(self, name: str) -> Queue:
        arguments = {"x-queue-type": "quorum"}
        return Queue(name, _NAMELESS, name, expires=_QUEUE_EXPIRES_S, queue_arguments=arguments)  # type: ignore[no-untyped-call]


class _Lines(ConnectionPool):
    """Senders' connections to a RabbitMQ, which do not notice by themselves that they are dead.

    A network may acknowledge packets that it no longer delivers. So a connection that has not answered for `_TRUSTED_S`
    is probed before its next use, and closed if it does not answer within `_ANSWERS_S`; kombu then opens another.
    """

    def __init__(self, connection: Connection, limit: int) -> None:
        self._answered_at: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        super().__init__(connection, limit)  # type: ignore[no-untyped-call]

    def prepare(self, resource: Any) -> Connection:
        line: Connection = super().prepare(resource)  # type: ignore[no-untyped-call]
        if not line.connected or time.monotonic() > self._answered_at[line] + _TRUSTED_S:
            if line.connected and not _answers(line):
                line.collect()  # type: ignore[no-untyped-call]
            self._answered_at[line] = time.monotonic()
        return line


def _answers(line: Connection) -> bool:
    try:
        with line.connection.transport.having_timeout(_ANSWERS_S):
            # a request with an answer that changes nothing for a connection without consumers
            line.default_channel.basic_qos(0, 0, False)  # type: ignore[no-untyped-call]
    except Exception as error:  # the transport raises anything from OSError to its own errors
        log.info("Broker connection was dead (%s)", error)
        return False
    return True


class _Amqp(AMQP):  # type: ignore[misc]
    queues_cls = _Queues
    default_exchange = _NAMELESS
    _producer_pool: ProducerPool | None

    @property
    def producer_pool(self) -> ProducerPool:
        if self._producer_pool is None and is_rabbitmq(self.app.conf.broker_url):
            lines = _Lines(self.app.connection_for_write(), self.app.conf.broker_pool_limit)
            self._producer_pool = ProducerPool(lines, limit=lines.limit)  # type: ignore[no-untyped-call]
        return super().producer_pool  # type: ignore[no-any-return]


def celery_app(broker_url: str, name: str = "farm") -> Celery:
    """Return a Celery app with the farm's settings; makes no connection."""
    app = Celery(name, broker=broker_url, amqp=_Amqp)
    app.conf.update(SETTINGS, broker_transport_options=RABBITMQ if is_rabbitmq(broker_url) else REDIS)
    return app


def rabbitmq_version(broker_url: str) -> str:
    """Connect to a RabbitMQ once and return its version. Raises BrokerUnavailable, or InvalidRequest if refused."""
    try:
        with celery_app(broker_url, "farm-doctor").connection_for_write() as connection:
            return str(connection.connection.server_properties.get("version", "of unknown version"))
    except Exception as error:  # anything from OSError to the protocol's error for a wrong password
        if refused := _rabbitmq_refusal(error):
            raise InvalidRequest(refused, field="broker_url") from error
        raise BrokerUnavailable(f"{broker_url.split('@')[-1]}: {error}") from error


def check_broker(broker_url: str) -> None:
    """Raise InvalidRequest if a broker permanently refuses the address; an unavailable broker is no error."""
    try:
        if is_rabbitmq(broker_url):
            rabbitmq_version(broker_url)
        elif redis_client(broker_url) is not None:
            with contextlib.closing(Signals(broker_url)) as signals:
                signals.check()
    except BrokerUnavailable as error:
        if error.__cause__ is not None and (refused := redis_refusal(error.__cause__)):
            raise InvalidRequest(refused, field="broker_url") from error


def _rabbitmq_refusal(error: BaseException | None) -> str:
    """Return why a RabbitMQ permanently refuses connections, and the remedy; empty if it may accept one."""
    while error is not None:
        code = getattr(error, "reply_code", None)
        if code == _ACCESS_REFUSED:
            return "the broker refuses the user or the password: correct them in its address, percent-encoded"
        if code == _NOT_ALLOWED:
            return (
                "the broker does not admit the user to that virtual host, or the virtual host does not exist: use "
                "`rabbitmqctl add_vhost` and `set_permissions`, or name another in its address (/ is %2F)"
            )
        error = error.__cause__ or error.__context__
    return ""


def enqueue(app: Celery, stage_messages: Sequence[StageMessage]) -> int:
    """Send messages for the remaining stages of each rollout on its node, many at a time where the broker allows it.

    Returns how many were sent without an error, though a RabbitMQ may still lose some. A broker outage is no error.
    """
    n_sent = 0
    try:
        with app.producer_or_acquire() as producer:
            for start in range(0, len(stage_messages), _AT_A_TIME):
                some = stage_messages[start : start + _AT_A_TIME]
                with producer.batch():
                    for message in some:
                        task_ids = [uuid() for _ in _stages_left(message.stage)]
                        _publish(app, producer, message, task_ids)
                n_sent += len(some)
    except Exception as error:  # the transports raise anything from OSError to their own errors
        log.warning("Broker does not answer (%s); queued messages will be sent again", error)
    return n_sent


def enqueue_next(app: Celery, message: StageMessage, task_ids: Sequence[str], root_id: str, parent_id: str) -> None:
    """Send the next message of a chain, with the ids that its tasks have in that chain.

    Raises the errors of the transport.
    """
    with app.producer_or_acquire() as producer:
        _publish(app, producer, message, task_ids, root_id, parent_id)


def _publish(
    app: Celery,
    producer: Producer,
    message: StageMessage,
    task_ids: Sequence[str],
    root_id: str | None = None,
    parent_id: str | None = None,
) -> None:
    """Send one message, a chain of the remaining stages, as Celery would, which takes ten times as long to build it."""
    links = [
        _link(message, stage, task_id) for stage, task_id in zip(_stages_left(message.stage), task_ids, strict=True)
    ]
    first = links.pop(0)
    task_id, queue = first["options"]["task_id"], app.amqp.queues[first["options"]["queue"]]
    headers = {
        "lang": "py",
        "task": first["task"],
        "id": task_id,
        "root_id": root_id or task_id,
        "parent_id": parent_id,
        "retries": 0,
        "timelimit": [None, None],
        "argsrepr": first["options"]["argsrepr"],
        "kwargsrepr": "{}",
        "origin": _ORIGIN,
    }
    embedded = {"callbacks": None, "errbacks": None, "chain": links[::-1], "chord": None}
    producer.publish(  # type: ignore[no-untyped-call]
        json.dumps([first["args"], {}, embedded]),
        exchange="",
        routing_key=queue.name,
        declare=[queue],
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        correlation_id=task_id,
        delivery_mode=2,
    )


def _stages_left(stage: Stage) -> Sequence[Stage]:
    return _STAGES[_STAGES.index(stage) :]


def _link(message: StageMessage, stage: Stage, task_id: str) -> dict[str, Any]:
    """Return one stage's link of a chain, in the form of Celery's signatures."""
    shown = (
        f"(rollout={message.rollout_id}, attempt={message.attempt},"
        f" batch={batch_of(message.rollout_id)}, stage={stage})"
    )
    return {
        "task": TASKS[stage],
        "args": [message.rollout_id, message.attempt],
        "kwargs": {},
        "options": {"queue": queue_name(stage, message.node), "argsrepr": shown, "task_id": task_id},
        "subtask_type": None,
        "immutable": True,
    }


def named_stage(shown: str | None) -> AttemptStage | None:
    """Return the stage of a message from its arguments in Celery's events; None if it is not one of ours."""
    match = _SHOWN_ARGUMENTS.fullmatch(shown or "")
    return match and AttemptStage(match["rollout_id"], int(match["attempt"]), Stage(match["stage"]))
