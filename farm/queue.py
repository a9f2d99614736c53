"""Names of queues and Celery tasks, and the ring: the only file of `farm` that imports Celery.

The broker is a doorbell. A message says which rollout to look at and which attempt is meant, nothing else; the
database says what to do. So a message that is lost is rung again and one that comes twice does nothing the second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from celery import Celery, chain

from farm.rollout import Stage
from farm.store.placement import Bell

log = logging.getLogger(__name__)

TASKS = {
    Stage.INIT: "rollout.init_sandbox",
    Stage.RUN: "rollout.run_agent",
    Stage.EVAL: "rollout.evaluate",
}
_STAGES = list(Stage)
_EXPIRES_S = 60
"""A ring nobody heard within this time is void; the dispatcher has rung again by then."""

SETTINGS: dict[str, Any] = {
    # without emulated acknowledgements there is no visibility timeout, no redelivery on reconnect, and three times the
    # throughput; that makes the broker deliver at most once, which is all a doorbell has to do
    "broker_transport_options": {
        "ack_emulation": False,
        "socket_timeout": 5,
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 25,
    },
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_pool_limit": 8,
    "broker_pool_acquire_timeout": 10,
    # a publish that fails is not repeated: the row stays queued and is rung again
    "task_publish_retry": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    # nobody serves this queue: a task without one of ours shows there instead of running somewhere
    "task_default_queue": "unrouted",
    "task_send_sent_event": False,
    "timezone": "UTC",
}
RABBITMQ_TRANSPORT = {"confirm_publish": True}


def queue_name(stage: Stage, node: str) -> str:
    """The queue that one node's pool for one stage serves."""
    return f"{stage}.{node}"


def celery_app(broker_url: str, name: str = "farm") -> Celery:
    """A Celery app with the farm's settings; makes no connection."""
    app = Celery(name, broker=broker_url)
    app.conf.update(SETTINGS)
    if not broker_url.startswith("redis"):
        app.conf.broker_transport_options = RABBITMQ_TRANSPORT
    return app


def ring(app: Celery, bells: Iterable[Bell]) -> int:
    """Ring what is left of each rollout's chain on its node. Returns how many; a broker that is away is no error."""
    rung = 0
    try:
        with app.producer_pool.acquire(block=True, timeout=10) as producer:
            for bell in bells:
                rest = _STAGES[_STAGES.index(bell.stage) :]
                chain(*[_signature(app, bell, stage) for stage in rest]).apply_async(producer=producer)
                rung += 1
    except Exception as error:  # the transports raise anything from OSError to their own
        log.warning("the broker does not answer (%s); what is queued will be rung again", error)
    return rung


def _signature(app: Celery, bell: Bell, stage: Stage) -> Any:
    return app.signature(
        TASKS[stage],
        args=(bell.rollout_id, bell.attempt),
        immutable=True,
        options={
            "queue": queue_name(stage, bell.node),
            "expires": _EXPIRES_S,
            "argsrepr": f"(rollout={bell.rollout_id}, attempt={bell.attempt}, batch={batch_of(bell.rollout_id)},"
            f" stage={stage})",
        },
    )


def batch_of(rollout_id: str) -> str:
    """The batch that a rollout id names: `batch.group.sample`."""
    return rollout_id.split(".", 1)[0]
