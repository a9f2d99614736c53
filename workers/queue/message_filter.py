"""The filter of a worker's broker: only the farm's own messages reach Celery.

Anything that reaches the broker can put anything into a queue, and a message that Celery cannot read ends its worker
with all running stages. So all other messages are logged in one line and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.message import Message
from kombu.transport import redis
from kombu.transport.virtual import Empty
from kombu.utils.json import dumps

from farm.records.rollout import Stage
from farm.scheduler.broker import TASKS, queue_name
from farm.settings import settings
from workers.plugins.plugin_faults import described, is_exhausted
from workers.process.worker import worker
from workers.queue.app import listeners

log = logging.getLogger(__name__)

_MAX_BYTES = 100_000
"""Maximum size of a message, which normally has about two thousand bytes."""
_SHOWN = 200
_MAX_HEADER = 10_000
_STAGES = {task: stage for stage, task in TASKS.items()}
_NOT_SET = {"shadow", "group", "replaced_task_nesting", "stamped_headers", "stamps"}
_OPTIONS = {"queue", "expires", "argsrepr", "task_id", "reply_to"}


def fault_of(message: Message, node: str, pool: str) -> str:
    """Return why a message is not valid for the pool of a node; empty if it is. The store knows if its rollout exists.

    A message is for the stage of its pool, and its chain must be the following stages, for the same attempt on the same
    node: another chain could send later stages elsewhere, late, or to a consumer that cannot read them.
    """
    headers = message.headers
    if not isinstance(headers, dict) or not isinstance(headers.get("id"), str):
        return "it does not name a task of a rollout"
    task = headers.get("task")
    stage = _STAGES.get(task) if isinstance(task, str) else None
    if stage is None:
        return "it does not name a task of a rollout"
    if pool and stage.value != pool:
        return f"its task is not that of stage {pool}"
    if invalid := [str(name)[:_SHOWN] for name, value in headers.items() if not _is_plain(name, value)]:
        return f"its header {invalid[0]!r} is not that of a stage message"
    if message.content_type != "application/json":
        return f"its content is {str(message.content_type)[:_SHOWN]!r}, not JSON"
    if len(message.body) > _MAX_BYTES:
        return f"it has {len(message.body)} bytes"
    try:
        arguments, named, embedded = message.payload
        rollout_id, attempt = arguments
        links = [_link(each) for each in embedded.get("chain") or []]
    except Exception as error:  # the payload may contain anything
        return f"it cannot be read ({type(error).__name__})"
    if not isinstance(rollout_id, str) or not rollout_id.isprintable() or type(attempt) is not int or named:
        return "its arguments are not those of a stage message"
    others = [embedded.get(kind) for kind in ("callbacks", "errbacks", "chord")]
    if any(others) or headers.get("eta") or links != [(*link, arguments) for link in _chain(stage, node)]:
        return "it asks for more than a stage message"
    return ""


def _is_plain(name: Any, value: Any) -> bool:
    """Return whether a header is like in the farm's own messages: short, and without a command to its consumer."""
    if value is None:
        return True
    if name == "timelimit":
        return bool(value == [None, None])
    if name in _NOT_SET:
        return not value
    return isinstance(value, int) or (isinstance(value, str) and len(value) <= _MAX_HEADER)


def _link(link: Any) -> tuple[Any, ...]:
    """Return the fields of a link of a chain that determine the next task."""
    options = link["options"]
    return link["task"], link.get("kwargs") or {}, options["queue"], options.keys() <= _OPTIONS, link["args"]


@cache
def _chain(stage: Stage, node: str) -> Sequence[tuple[Any, ...]]:
    """Return the links that follow a stage's message, the last stage first, each without its arguments."""
    stages = list(Stage)
    rest = stages[stages.index(stage) + 1 :]
    return [(TASKS[each], {}, queue_name(each, node), True) for each in reversed(rest)]


def _shown(raw: Any) -> str:
    return repr(raw[:_SHOWN] if isinstance(raw, str | bytes) else raw)[: 2 * _SHOWN]


class StageConsumer(CeleryConsumer):  # type: ignore[misc]
    """Celery's consumer of one worker with the filter in front."""

    class Blueprint(CeleryConsumer.Blueprint):  # type: ignore[misc]
        # it would declare thirty queues for delayed messages, which the farm does not send
        default_steps = [step for step in CeleryConsumer.Blueprint.default_steps if "delayed_delivery" not in step]  # noqa: RUF012

    def ensure_connected(self, conn: Any) -> Any:
        # a farm stands still without its broker, so a worker retries every few seconds, not every half minute
        conn.ensure_connection = partial(conn.ensure_connection, interval_start=0.5, interval_step=0.5, interval_max=3)
        return super().ensure_connected(conn)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # Celery would say goodbye to an unresponsive RabbitMQ and wait ten seconds for its answer
        with suppress(Exception):
            self.event_dispatcher.connection.collect()
        super().on_connection_error_after_connected(exc)

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Message], None]:
        take = super().create_task_handler(*args, **options)
        own = settings()

        def take_message(message: Message) -> None:
            if fault := fault_of(message, own.node, own.pool):
                self._drop(message, fault)
                return
            try:
                take(message)
            except self.connection_errors:
                raise
            except Exception as error:
                self._cannot_begin(message, error)

        return take_message

    def _cannot_begin(self, message: Message, error: Exception) -> None:
        """Handle a message that could not be passed to a thread. If no thread was left, that is not its fault."""
        if not is_exhausted(error):
            self._drop(message, described(error))
            return
        log.error("Worker takes no more stages: %s", described(error))
        # its rollout is still queued, so the message is sent again; a rejection would return it only to this worker
        message.ack_log_error(log, self.connection_errors)  # type: ignore[no-untyped-call]
        worker().watchdog.exhausted(error)

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        self._drop(message, f"it cannot be read ({type(exc).__name__})")

    def on_invalid_task(self, body: Any, message: Message, exc: Exception) -> None:
        self._drop(message, str(exc))

    def _drop(self, message: Message, fault: str) -> None:
        queues = ", ".join(self.app.amqp.queues.consume_from)
        log.error("Dropped a message on %s that is not a stage message: %s: %s", queues, fault, _shown(message.body))
        if not message.acknowledged:
            message.reject_log_error(log, self.connection_errors)  # type: ignore[no-untyped-call]


def _check_envelope(message: Any) -> None:
    """Raise TypeError unless it is a kombu envelope; some of kombu's own errors look like a lost broker."""
    if not isinstance(message, dict) or not isinstance(message.get("properties"), dict):
        raise TypeError("no envelope")
    if not isinstance(message["properties"].get("delivery_tag"), str):
        raise TypeError("no delivery tag")


class RedisChannel(redis.Channel):
    """A consumer of lists that survives entries that are not JSON."""

    # the farm resends a message that was taken and not started; kombu would leave it, pickled, in a file for ever
    do_restore = False
    _sender: Any = None

    def _create_client(self, asynchronous: bool = False) -> Any:
        """Return one client for all messages sent on a connection pool; kombu would create one for each message."""
        if asynchronous:
            return super()._create_client(asynchronous=True)  # type: ignore[no-untyped-call]
        if self._sender is None or self._sender.connection_pool is not self.pool:
            self._sender = super()._create_client()  # type: ignore[no-untyped-call]
        return self._sender

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **options: Any) -> None:
        """Publish an event and record the number of listeners."""
        topic, text = self._get_publish_topic(exchange, routing_key), dumps(message)  # type: ignore[no-untyped-call]
        with self.conn_or_acquire() as client:
            listeners.counted(client.publish(topic, text))

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (*self.connection_errors, *self.connection.channel_errors, Empty):
            raise
        except Exception as error:
            raw = getattr(error, "doc", getattr(error, "object", ""))
            self.connection.drop(", ".join(self.active_queues), error, raw)
            return True


class RedisTransport(redis.Transport):
    """Redis as a broker, for workers."""

    Channel = RedisChannel

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            _check_envelope(message)
            super()._deliver(message, queue)  # type: ignore[no-untyped-call]
        except (*self.connection_errors, *self.channel_errors):
            raise
        except Exception as error:
            self.drop(queue, error, message)

    def drop(self, queue: str, error: Exception, raw: Any) -> None:
        """Log a dropped message."""
        log.error("Dropped invalid data on %s: %s: %s", queue, type(error).__name__, _shown(raw))
