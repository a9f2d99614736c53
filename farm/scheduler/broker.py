"""Names of queues and Celery tasks, and the sending of messages: the only file of `farm` that imports Celery.

A message only names a rollout and its attempt; the database says what to do. So a lost message is sent again, and one
that comes twice does nothing the second time.
It may be Redis or RabbitMQ, and all that differs between them is here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery, chain
from celery.app.amqp import AMQP, Queues
from kombu.connection import Connection, ConnectionPool
from kombu.entity import Exchange, Queue
from kombu.pools import ProducerPool

from farm.errors import BrokerUnavailable
from farm.ids import batch_of
from farm.records.rollout import Stage
from farm.store.placement import StageMessage

log = logging.getLogger(__name__)

TASKS = {
    Stage.INIT: "rollout.init_sandbox",
    Stage.RUN: "rollout.run_agent",
    Stage.EVAL: "rollout.evaluate",
}
_STAGES = list(Stage)
_EXPIRES_S = 3600
"""Seconds until an unread message expires. It may wait so long behind others: a busy pool is sent no repeats."""
_QUEUE_EXPIRES_S = 2 * _EXPIRES_S
"""Seconds until a queue without consumers is removed, as that of a removed node."""
_TRUSTED_S = 10.0
_ANSWERS_S = 1.0

SETTINGS: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # what a broker refuses for now, such as a Redis out of memory, is retried as if it were unavailable
    "broker_channel_error_retry": True,
    # by it consumers notice a RabbitMQ that vanished without closing connections; Redis has its own check
    "broker_heartbeat": 10,
    "broker_pool_limit": 8,
    "broker_pool_acquire_timeout": 10,
    # a publish that fails is not repeated: the row stays queued and its message is sent again
    "task_publish_retry": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    # no worker serves this queue: a task without one of ours shows there instead of running somewhere
    "task_default_queue": "unrouted",
    "task_send_sent_event": False,
    "timezone": "UTC",
}
REDIS = {
    # without emulated acknowledgements there is no visibility timeout, no redelivery on reconnect, and three times the
    # throughput; that makes the broker deliver at most once, which suffices
    "ack_emulation": False,
    # a list for each queue instead of four
    "priority_steps": [0],
    "socket_timeout": 5,
    "socket_connect_timeout": 2,
    "socket_keepalive": True,
    "health_check_interval": 10,
}
RABBITMQ = {
    # a frozen server must not hold the dispatcher; messages are rarely confirmed, as the store shows if one was lost
    "read_timeout": 5,
    "write_timeout": 5,
}


def queue_name(stage: Stage, node: str) -> str:
    """Return the name of the queue that one node's pool for one stage serves."""
    return f"{stage}.{node}"


def is_rabbitmq(broker_url: str) -> bool:
    """Return whether a broker's address is that of a RabbitMQ: `amqp://`, or `amqps://` for TLS."""
    return broker_url.startswith(("amqp://", "amqps://", "pyamqp://"))


_NAMELESS = Exchange("")  # type: ignore[no-untyped-call]


class _Queues(Queues):  # type: ignore[misc]
    """Queues, declared the same way by workers and senders.

    There is no exchange but the nameless one that each queue has: nothing to bind, hence nothing that a Redis without
    persistence forgets while it is down, nor that stays when a node and its queues are gone. `x-queue-type` is for
    RabbitMQ, whose quorum queues survive the loss of a server; Redis takes no notice.
    """

    def new_missing(self, name: str) -> Queue:
        arguments = {"x-queue-type": "quorum"}
        return Queue(name, _NAMELESS, name, expires=_QUEUE_EXPIRES_S, queue_arguments=arguments)  # type: ignore[no-untyped-call]


class _Lines(ConnectionPool):
    """Senders' connections to a RabbitMQ, which would not notice by themselves that one is dead.

    A network may go on acknowledging what it no longer delivers. So a connection that has not answered for `_TRUSTED_S`
    is probed before it is used, and closed if it does not answer within `_ANSWERS_S`; kombu then opens another.
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
            # of all requests with an answer, this one changes nothing for a connection without consumers
            line.default_channel.basic_qos(0, 0, False)  # type: ignore[no-untyped-call]
    except Exception as error:  # the transport raises anything from OSError to its own
        log.info("a connection to the broker was dead (%s)", error)
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
    """Connect to a RabbitMQ once and return its version. Raises BrokerUnavailable."""
    try:
        with celery_app(broker_url, "farm-doctor").connection_for_write() as connection:
            return str(connection.connection.server_properties.get("version", "of unknown version"))
    except Exception as error:  # anything from OSError to what its protocol calls a wrong password
        raise BrokerUnavailable(f"{broker_url.split('@')[-1]}: {error}") from error


def enqueue(app: Celery, stage_messages: Iterable[StageMessage]) -> int:
    """Send messages for the stages left of each rollout on its node. Returns how many; a broker outage is no error."""
    rung = 0
    try:
        for message in stage_messages:
            rest = _STAGES[_STAGES.index(message.stage) :]
            chain(*[_signature(app, message, stage) for stage in rest]).apply_async()
            rung += 1
    except Exception as error:  # the transports raise anything from OSError to their own
        log.warning("the broker does not answer (%s); what is queued will be sent again", error)
    return rung


def _signature(app: Celery, message: StageMessage, stage: Stage) -> Any:
    return app.signature(
        TASKS[stage],
        args=(message.rollout_id, message.attempt),
        immutable=True,
        options={
            "queue": queue_name(stage, message.node),
            "expires": _EXPIRES_S,
            "argsrepr": f"(rollout={message.rollout_id}, attempt={message.attempt},"
            f" batch={batch_of(message.rollout_id)}, stage={stage})",
        },
    )
