"""What a worker takes from its broker: rings of the farm, and nothing else gets as far as Celery.

A queue is a place where anybody who reaches the broker can put anything, and what Celery cannot read ends its worker,
with all that the worker plays. So whatever is not a ring is logged, in one line, and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.message import Message
from kombu.transport import redis
from kombu.transport.virtual import Empty

from farm.queue import TASKS

log = logging.getLogger(__name__)

_MOST_BYTES = 100_000
"""A ring has some two thousand."""
_SHOWN = 200
_TASKS = list(TASKS.values())


def fault_of(message: Message) -> str:
    """Why a message is no ring; empty if it is one. Whether its rollout exists is for the store to say."""
    headers = message.headers
    if not isinstance(headers, dict) or headers.get("task") not in _TASKS or not isinstance(headers.get("id"), str):
        return "it names no task of a rollout"
    if message.content_type != "application/json":
        return f"its content is {str(message.content_type)[:_SHOWN]!r}, not JSON"
    if len(message.body) > _MOST_BYTES:
        return f"it has {len(message.body)} bytes"
    try:
        arguments, named, embedded = message.payload
        rollout_id, attempt = arguments
        links = embedded.get("chain") or []
        rings = all(link["task"] in _TASKS for link in links)
    except Exception as error:  # whatever is in there
        return f"it cannot be read ({type(error).__name__})"
    if not isinstance(rollout_id, str) or not rollout_id.isprintable() or type(attempt) is not int or named:
        return "its arguments are not those of a ring"
    others = [embedded.get(kind) for kind in ("callbacks", "errbacks", "chord")]
    return "" if rings and not any(others) and not headers.get("eta") else "it asks for more than a ring"


def _shown(raw: Any) -> str:
    return repr(raw[:_SHOWN] if isinstance(raw, str | bytes) else raw)[: 2 * _SHOWN]


class Consumer(CeleryConsumer):  # type: ignore[misc]
    """Celery's consumer of one worker, behind a guard."""

    class Blueprint(CeleryConsumer.Blueprint):  # type: ignore[misc]
        # it would declare thirty queues for rings with a delay, and there are none
        default_steps = [step for step in CeleryConsumer.Blueprint.default_steps if "delayed_delivery" not in step]  # noqa: RUF012

    def ensure_connected(self, conn: Any) -> Any:
        # a farm stands still without its broker, so a worker asks for it every few seconds, not every half minute
        conn.ensure_connection = partial(conn.ensure_connection, interval_start=0.5, interval_step=0.5, interval_max=3)
        return super().ensure_connected(conn)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # it would take its leave of a RabbitMQ that answers no more, and wait ten seconds for its answer
        with suppress(Exception):
            self.event_dispatcher.connection.collect()
        super().on_connection_error_after_connected(exc)

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Message], None]:
        take = super().create_task_handler(*args, **options)

        def take_ring(message: Message) -> None:
            if fault := fault_of(message):
                self._drop(message, fault)
                return
            try:
                take(message)
            except self.connection_errors:
                raise
            except Exception as error:
                self._drop(message, f"{type(error).__name__}: {error}")

        return take_ring

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        self._drop(message, f"it cannot be read ({type(exc).__name__})")

    def on_invalid_task(self, body: Any, message: Message, exc: Exception) -> None:
        self._drop(message, str(exc))

    def _drop(self, message: Message, fault: str) -> None:
        queues = ", ".join(self.app.amqp.queues.consume_from)
        log.error("dropped a message on %s that is no ring: %s: %s", queues, fault, _shown(message.body))
        if not message.acknowledged:
            message.reject_log_error(log, self.connection_errors)  # type: ignore[no-untyped-call]


def _check_envelope(message: Any) -> None:
    """Raise TypeError unless it is what kombu puts around a message; some of its own errors look like a lost broker."""
    if not isinstance(message, dict) or not isinstance(message.get("properties"), dict):
        raise TypeError("no envelope")
    if not isinstance(message["properties"].get("delivery_tag"), str):
        raise TypeError("no delivery tag")


class RedisChannel(redis.Channel):
    """A consumer of lists that outlives an entry which is not even JSON."""

    # a ring that was taken and not begun is rung again; kombu would leave it, pickled, in a file that nobody removes
    do_restore = False

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
        """Say what is not passed on."""
        log.error("dropped what is no message on %s: %s: %s", queue, type(error).__name__, _shown(raw))
