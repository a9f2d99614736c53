"""Queues are declared equally by every process, and an unreachable broker is not an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.errors import BrokerUnavailable
from farm.records.rollout import Stage
from farm.scheduler.broker import celery_app, enqueue, is_rabbitmq, named_stage, queue_name, rabbitmq_version
from farm.store.placement import StageMessage
from farm.store.reports.stage_ends import AttemptStage
from workers.queue import tasks
from workers.queue.message_filter import fault_of

AWAY = "amqp://guest:secret@127.0.0.1:1//"


@pytest.mark.parametrize("url", ["redis://broker", "redis+socket:///broker", "amqp://broker", "amqps://broker"])
def test_queue_has_no_binding_and_expires_without_consumers(url: str) -> None:
    with celery_app(url) as app:
        queue = app.amqp.queues[queue_name(Stage.RUN, "one")]
        assert (queue.name, queue.routing_key, queue.exchange.name) == ("run.one", "run.one", "")
        assert queue.expires == 7200
        assert queue.queue_arguments == {"x-queue-type": "quorum"}
        assert ("ack_emulation" in app.conf.broker_transport_options) == (not is_rabbitmq(url))


@pytest.mark.parametrize("url", [AWAY, "redis+socket://{}/redis.sock"])
def test_unreachable_broker_is_not_an_error(url: str, tmp_path: Path) -> None:
    with celery_app(url.format(tmp_path)) as app:
        # other than the workers' app, whose messages the dispatcher sends again
        assert tasks.run_agent.name not in app.tasks
        assert enqueue(app, [StageMessage("b.0.0", 1, Stage.INIT, "one")]) == 0


@pytest.mark.parametrize("shown", [None, "", "('a', 1)", "(rollout=a, attempt=x, batch=b, stage=run)", "(rollout=a b)"])
def test_arguments_of_other_tasks_name_no_stage(shown: str | None) -> None:
    assert named_stage(shown) is None


def test_arguments_as_flower_shows_them_name_their_stage() -> None:
    shown = "(rollout=b-1.0.3, attempt=2, batch=b-1, stage=eval)"
    assert named_stage(shown) == AttemptStage("b-1.0.3", 2, Stage.EVAL)


def test_sent_messages_are_accepted_by_the_workers(broker_url: str) -> None:
    """Many are sent at once, each with the chain of the remaining stages."""
    sent = [StageMessage(f"b.0.{n}", 2, Stage.INIT, "one") for n in range(250)]
    with celery_app(broker_url) as app, app.connection_for_read() as connection:
        assert enqueue(app, sent) == len(sent)
        assert enqueue(app, [StageMessage("b.0.250", 2, Stage.EVAL, "one")]) == 1
        taken = {}
        for stage, n in ((Stage.INIT, len(sent)), (Stage.EVAL, 1)):
            queue = app.amqp.queues[queue_name(stage, "one")](connection.default_channel)
            for _ in range(n):
                message = queue.get(accept=["json"])
                assert fault_of(message, "one", stage) == ""
                taken[message.payload[0][0]] = len(message.payload[2]["chain"])
            assert queue.get() is None
    assert taken == {f"b.0.{n}": 2 for n in range(250)} | {"b.0.250": 0}


def test_doctor_error_has_the_address_and_no_password() -> None:
    with pytest.raises(BrokerUnavailable, match=r"^127\.0\.0\.1:1") as raised:
        rabbitmq_version(AWAY)
    assert "secret" not in str(raised.value)
