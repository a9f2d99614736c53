"""Queues are the same from every declaring process, and a broker that is away is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import BrokerUnavailable
from farm.records.rollout import Stage
from farm.scheduler.broker import celery_app, enqueue, is_rabbitmq, queue_name, rabbitmq_version
from farm.store.placement import StageMessage
from workers.queue import tasks

AWAY = "amqp://guest:secret@127.0.0.1:1//"


@pytest.mark.parametrize("url", ["redis://broker", "redis+socket:///broker", "amqp://broker", "amqps://broker"])
def test_a_queue_binds_to_nothing_and_goes_when_nobody_serves_it(url: str) -> None:
    with celery_app(url) as app:
        queue = app.amqp.queues[queue_name(Stage.RUN, "one")]
        assert (queue.name, queue.routing_key, queue.exchange.name) == ("run.one", "run.one", "")
        assert queue.expires == 7200
        assert queue.queue_arguments == {"x-queue-type": "quorum"}
        assert ("ack_emulation" in app.conf.broker_transport_options) == (not is_rabbitmq(url))


@pytest.mark.parametrize("url", [AWAY, "redis+socket://{}/redis.sock"])
def test_a_broker_that_is_away_is_no_error(url: str, tmp_path: Path) -> None:
    with celery_app(url.format(tmp_path)) as app:
        # those of the workers' app, whose messages are sent again by the dispatcher
        assert tasks.run_agent.name not in app.tasks
        assert enqueue(app, [StageMessage("b.0.0", 1, Stage.INIT, "one")]) == 0


def test_the_doctor_is_told_where_nobody_answers_but_no_password() -> None:
    with pytest.raises(BrokerUnavailable, match=r"^127\.0\.0\.1:1") as raised:
        rabbitmq_version(AWAY)
    assert "secret" not in str(raised.value)
