"""Notifications between the processes of a farm over Redis pub/sub: work to do, a rollout ended or was cancelled.

They only shorten polling intervals: the database is authoritative and every listener also polls it, so a lost, late or
duplicate notification changes nothing. With another broker than Redis there are none.

Any Redis client can send them, so their content is not trusted: they only trigger a query of the store. The number of
queries is bounded: notifications that arrive together trigger one, at most one is made per `_MIN_S` on average (up to
`_BURST_S / _MIN_S` in a row), and a listener that gets more than `_MOST` at once unsubscribes for `_AWAY_S`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable
from functools import cache
from urllib.parse import urlsplit

import redis

from farm.errors import BrokerUnavailable

log = logging.getLogger(__name__)

WAKE = "farm:wake"
ENDED = "farm:ended"
CANCELLED = "farm:cancelled"
ENGINES = "farm:engines"
ACKNOWLEDGED = "farm:heeded"
SANDBOXES = "farm:sandboxes"


def redis_client(broker_url: str) -> redis.Redis | None:
    """Return a client if the broker is Redis, else None; it does not connect yet."""
    if broker_url.startswith("redis+socket://"):
        broker_url = "unix://" + broker_url.removeprefix("redis+socket://").replace("virtual_host=", "db=")
    if not broker_url.startswith(("redis://", "rediss://", "unix://")):
        return None
    client: redis.Redis = redis.Redis.from_url(broker_url, socket_timeout=5, socket_connect_timeout=2)
    return client


def redis_refusal(error: BaseException) -> str:
    """Return why a Redis will never accept this client, and the fix; empty if it may."""
    message = str(error)
    if isinstance(error, redis.AuthenticationError) or message.startswith(("NOAUTH", "WRONGPASS", "AUTH ", "ERR AUTH")):
        return "the broker refuses the user or the password: check them in its address (percent-encoded)"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return "the broker user has too few rights: grant +@all, ~* and &* with ACL SETUSER"
    if "SELECT is not allowed in cluster mode" in message:
        return "the broker is a Redis cluster, which the farm does not support: use a single Redis"
    if "unknown command" in message:
        return "the server at the broker's address is not a Redis server (perhaps a Sentinel): check the port"
    if message.startswith("DENIED"):
        return "the broker is in protected mode and serves only its own machine: set a password on it (requirepass)"
    if "WRONG_VERSION_NUMBER" in message or "CERTIFICATE_VERIFY_FAILED" in message:
        return "the broker does not use TLS, or its certificate is not trusted; redis:// is without TLS, rediss:// with"
    if "DB index" in message or "Invalid Database" in message:
        return "the broker has no database with that number: use another in its address, such as /0"
    if isinstance(error, redis.exceptions.InvalidResponse):
        return "the server at the broker's address is not Redis: check the host and the port"
    return ""


@cache
def _warn(refused: str) -> None:
    log.warning("%s; polling the store until then", refused)


def _say_refused(error: BaseException) -> None:
    if refused := redis_refusal(error):
        _warn(refused)


_CHECK_S = 3.0
_MIN_S = 0.01
_BURST_S = 0.1
_MOST = 2_000
_AWAY_S = 1.0
_LONGEST = 10_000
"""Characters of a message that are read; only lists of cancelled rollouts can be longer."""


class Signals:
    """Sends and receives notifications. Never raises for an unavailable broker."""

    def __init__(self, broker_url: str) -> None:
        self._broker_url = broker_url
        self._redis = redis_client(broker_url)

    def wake(self) -> None:
        """Notify the dispatcher of rollouts to place."""
        self._publish(WAKE, "")

    def ended(self, batch_id: str) -> None:
        """Notify the dispatcher and the clients that wait for a batch that a rollout ended.

        With the id of a borrowed sandbox: it started or ended.
        """
        self._publish(ENDED, batch_id)

    def cancelled(self, rollout_ids: Collection[str]) -> None:
        """Notify all workers of cancelled rollouts."""
        self._publish(CANCELLED, json.dumps(sorted(rollout_ids)))

    def engines(self) -> None:
        """Notify all workers of changed engines or new orders to them."""
        self._publish(ENGINES, "")

    def acknowledged(self) -> None:
        """Notify clients with pending engine orders that a worker or engine follows them."""
        self._publish(ACKNOWLEDGED, "")

    def sandboxes(self) -> None:
        """Notify the nodes of borrowed sandboxes to start or end."""
        self._publish(SANDBOXES, "")

    def _publish(self, channel: str, message: str) -> None:
        if self._redis is not None:
            try:
                self._redis.publish(channel, message)
            except (redis.RedisError, OSError) as error:
                _say_refused(error)
                log.debug("Notification on %s not sent: %s", channel, error)

    def check(self) -> None:
        """Raise BrokerUnavailable if the broker does not answer; without Redis only its port is checked."""
        address = urlsplit(self._broker_url)
        try:
            if self._redis is not None:
                self._redis.ping()
            elif address.hostname:
                socket.create_connection((address.hostname, address.port or 5672), _CHECK_S).close()
        except (redis.RedisError, OSError) as error:
            reason = redis_refusal(error) or f"the broker does not answer: {type(error).__name__}"
            raise BrokerUnavailable(reason) from error

    def listen(self, *channels: str) -> Listener:
        """Subscribe to notifications sent from now on."""
        return Listener(self._redis, channels)

    def close(self) -> None:
        if self._redis is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._redis.close()


class Listener:
    """One subscription. Reconnects automatically; messages sent while disconnected are lost."""

    def __init__(self, client: redis.Redis | None, channels: Iterable[str]) -> None:
        self._channels = tuple(channels)
        self._pubsub = client.pubsub(ignore_subscribe_messages=True) if client else None  # type: ignore[no-untyped-call]
        self._subscribed = False
        self._back_at = self._next_at = 0.0
        self._subscribe()

    def wait(self, timeout_s: float, wanted: Callable[[str, str], bool] = lambda channel, message: True) -> list[str]:
        """Return the received messages as soon as there are any; an empty list after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        time.sleep(max(0.0, min(self._next_at - _BURST_S, deadline) - time.monotonic()))
        batch_ids: list[str] = []
        n_read = 0
        while n_read < _MOST:
            left = 0.0 if batch_ids else max(0.0, deadline - time.monotonic())
            message = self._next(left)
            if message is None:
                if batch_ids or time.monotonic() >= deadline:
                    break
                continue
            n_read += 1
            if wanted(*message):
                batch_ids.append(message[1])
        else:
            self._leave()
        if batch_ids:
            self._next_at = max(self._next_at, time.monotonic()) + _MIN_S
        return batch_ids

    def _leave(self) -> None:
        """Unsubscribe for `_AWAY_S`: the channel is flooded, and listeners also poll the store."""
        log.warning("More than %d notifications at once on %s; ignoring them for %g s", _MOST, self._channels, _AWAY_S)
        self._back_at = time.monotonic() + _AWAY_S
        self._subscribed = False
        if self._pubsub is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._pubsub.reset()

    def _next(self, timeout_s: float) -> tuple[str, str] | None:
        if self._pubsub is None or not (self._subscribed or self._subscribe()):
            # the caller repeats this until its own timeout
            time.sleep(timeout_s if self._pubsub is None else min(timeout_s, _AWAY_S / 2))
            return None
        try:
            message = self._pubsub.get_message(timeout=timeout_s)
        except (redis.RedisError, OSError, ValueError):
            self._subscribed = False
            time.sleep(min(timeout_s, 0.2))
            return None
        if message is None:
            return None
        return message["channel"].decode(), message["data"][:_LONGEST].decode(errors="replace")

    def _subscribe(self) -> bool:
        if self._pubsub is None or time.monotonic() < self._back_at:
            return False
        try:
            self._pubsub.subscribe(*self._channels)
            self._subscribed = True
        except (redis.RedisError, OSError) as error:
            _say_refused(error)
            self._subscribed = False
        return self._subscribed

    def close(self) -> None:
        if self._pubsub is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._pubsub.close()
