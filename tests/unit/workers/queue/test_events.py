"""Task events are sent to a Redis only while a listener is subscribed; the worker's own are always sent."""

from __future__ import annotations

import base64
import json
from typing import Any

from farm.scheduler.broker import celery_app
from tests.services.servers.redis import redis_client
from workers.queue import app as _  # noqa: F401 - it has Celery use the workers' transport
from workers.queue.app import EventListeners, listeners

TIMEOUT_S = 30.0


def received(pubsub: Any) -> str:
    message = pubsub.get_message(ignore_subscribe_messages=True, timeout=TIMEOUT_S)
    return base64.b64decode(json.loads(message["data"])["body"]).decode()


def test_task_events_are_sent_while_a_listener_is_subscribed(broker_url: str) -> None:
    with celery_app(broker_url) as app, app.connection_for_write() as connection, redis_client(broker_url) as client:
        dispatcher = app.events.Dispatcher(connection, hostname="here", buffer_group=["task"])
        listeners.wait_for(dispatcher)

        def send(task: str) -> None:
            dispatcher.send("task-started", uuid=task)
            dispatcher.flush()

        dispatcher.send("worker-heartbeat")
        with client.pubsub() as pubsub:
            pubsub.psubscribe("/0.celeryev/*")
            assert pubsub.get_message(timeout=TIMEOUT_S)["type"] == "psubscribe"
            send("unheard")
            dispatcher.send("worker-heartbeat")
            send("heard")
            assert "worker-heartbeat" in received(pubsub), "earlier events are not in transit"
            assert '"uuid": "heard"' in received(pubsub)
            pubsub.punsubscribe()
            assert pubsub.get_message(timeout=TIMEOUT_S)["type"] == "punsubscribe"
        dispatcher.send("worker-heartbeat")
        assert dispatcher.groups == {"worker"}


def test_broker_without_listener_counts_gets_all_events(broker_url: str) -> None:
    with celery_app(broker_url) as app, app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection, hostname="here")
        EventListeners().wait_for(dispatcher)
        assert dispatcher.groups == set(), "Celery sends all events then"
