"""Hints between the processes of a farm, over Redis pub/sub: wake up, this ended, this was cancelled.

They save a polling interval and nothing else: the database says what is true, so every listener also looks there by
itself, and a hint that is lost, late or doubled changes nothing. Without Redis (another broker) there are no hints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable

import redis

log = logging.getLogger(__name__)

WAKE = "farm:wake"
ENDED = "farm:ended"
CANCELLED = "farm:cancelled"
ENGINES = "farm:engines"
HEEDED = "farm:heeded"


def redis_client(broker_url: str) -> redis.Redis | None:
    """A client for the broker if that is Redis; no connection is made yet."""
    if broker_url.startswith("redis+socket://"):
        broker_url = "unix://" + broker_url.removeprefix("redis+socket://").replace("virtual_host=", "db=")
    if not broker_url.startswith(("redis://", "rediss://", "unix://")):
        return None
    client: redis.Redis = redis.Redis.from_url(broker_url, socket_timeout=5, socket_connect_timeout=2)
    return client


class Signals:
    """Sends and awaits hints. Never raises for a broker that is away."""

    def __init__(self, broker_url: str) -> None:
        self._redis = redis_client(broker_url)

    def wake(self) -> None:
        """Tell the dispatcher that there is something to place."""
        self._publish(WAKE, "")

    def ended(self, batch_id: str) -> None:
        """Tell those who wait for a batch, and the dispatcher, that a rollout ended."""
        self._publish(ENDED, batch_id)

    def cancelled(self, rollout_ids: Collection[str]) -> None:
        """Tell all workers to let go of these rollouts."""
        self._publish(CANCELLED, json.dumps(sorted(rollout_ids)))

    def engines(self) -> None:
        """Tell all workers to look at the engines and what is ordered of them."""
        self._publish(ENGINES, "")

    def heeded(self) -> None:
        """Tell those who gave engines an order that a worker, or an engine, follows it."""
        self._publish(HEEDED, "")

    def _publish(self, channel: str, message: str) -> None:
        if self._redis is not None:
            try:
                self._redis.publish(channel, message)
            except (redis.RedisError, OSError) as error:
                log.debug("no hint on %s: %s", channel, error)

    def listen(self, *channels: str) -> Listener:
        """Subscribe; hints sent from now on are heard."""
        return Listener(self._redis, channels)

    def close(self) -> None:
        if self._redis is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._redis.close()


class Listener:
    """One subscription. Reconnects by itself; what was said meanwhile is missed."""

    def __init__(self, client: redis.Redis | None, channels: Iterable[str]) -> None:
        self._channels = tuple(channels)
        self._pubsub = client.pubsub(ignore_subscribe_messages=True) if client else None  # type: ignore[no-untyped-call]
        self._subscribed = False
        self._subscribe()

    def wait(self, timeout_s: float, wanted: Callable[[str, str], bool] = lambda channel, message: True) -> list[str]:
        """The messages that came, at once when there are any, else after `timeout_s` none."""
        deadline = time.monotonic() + timeout_s
        found: list[str] = []
        while True:
            left = 0.0 if found else max(0.0, deadline - time.monotonic())
            message = self._next(left)
            if message is None:
                if found or time.monotonic() >= deadline:
                    return found
            elif wanted(*message):
                found.append(message[1])

    def _next(self, timeout_s: float) -> tuple[str, str] | None:
        if self._pubsub is None or not (self._subscribed or self._subscribe()):
            time.sleep(timeout_s)
            return None
        try:
            message = self._pubsub.get_message(timeout=timeout_s)
        except (redis.RedisError, OSError, ValueError):
            self._subscribed = False
            time.sleep(min(timeout_s, 0.2))
            return None
        if message is None:
            return None
        return message["channel"].decode(), message["data"].decode(errors="replace")

    def _subscribe(self) -> bool:
        if self._pubsub is None:
            return False
        try:
            self._pubsub.subscribe(*self._channels)
            self._subscribed = True
        except (redis.RedisError, OSError):
            self._subscribed = False
        return self._subscribed

    def close(self) -> None:
        if self._pubsub is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._pubsub.close()
