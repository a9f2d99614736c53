"""Any client of the broker may send notifications and messages of any kind: none of them changes the store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

import farm
from farm.notifications import ACKNOWLEDGED, CANCELLED, ENDED, ENGINES, WAKE, Signals, redis_client
from farm.records.rollout import Stage, State
from farm.scheduler.broker import TASKS, celery_app
from tests.services.farms import embedded, farm_folder, until
from tests.services.servers.redis import redis_server

N = 6
NOOP = {"data_source": "noop", "fields": {"seconds": 3.0}}


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[farm.Farm, str]]:
    with (
        farm_folder() as folder,
        embedded(folder) as running,
        farm.connect(running.store_url, broker_url=running.broker_url) as client,
    ):
        yield client, running.broker_url


def test_forged_notifications_and_control_commands_have_no_effect(here: tuple[farm.Farm, str]) -> None:
    client, broker_url = here
    batch_id = client.submit({"instances": [NOOP] * N, "max_attempts": 1, "max_losses": 0})
    until(lambda: client.status(batch_id).stages[Stage.RUN][State.ACTIVE] == N, "they run", 60.0)
    ids = [f"{batch_id}.{n}.0" for n in range(N)]
    redis = redis_client(broker_url)
    assert redis is not None
    for forged in (
        json.dumps(ids),
        json.dumps([batch_id]),
        "[]",
        "{",
        "",
        "x" * 1_000_000,
        "\0",
        json.dumps({"a": ids}),
    ):
        for channel in (CANCELLED, ENDED, ENGINES, ACKNOWLEDGED, WAKE):
            redis.publish(channel, forged)
    # messages that Celery's remote control would obey
    app = celery_app(broker_url, "forger")
    for order, arguments in (
        ("cancel_consumer", {"queue": "run.here"}),
        ("rate_limit", {"task_name": TASKS[Stage.EVAL], "rate_limit": "1/h"}),
        ("pool_shrink", {"n": 100}),
        ("shutdown", {}),
    ):
        app.control.broadcast(order, arguments)
    result = client.collect(batch_id, timeout_s=600)
    assert [(rollout.state, rollout.n_lost, rollout.attempt) for rollout in result] == [(State.COMPLETED, 0, 1)] * N
    redis.close()


def test_notification_flood_does_not_block_rollouts_or_cancels(here: tuple[farm.Farm, str]) -> None:
    client, broker_url = here
    over = threading.Event()

    def flood() -> None:
        redis = redis_client(broker_url)
        assert redis is not None
        while not over.is_set():
            pipe = redis.pipeline(transaction=False)
            for _ in range(500):
                pipe.publish(CANCELLED, '["b.0.0"]')
                pipe.publish(WAKE, "")
            pipe.execute()
        redis.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        # on a busy machine a flood may starve a worker, whose rollouts are then repeated
        batch_id = client.submit({"instances": [NOOP] * N, "max_attempts": 1})
        ended = client.collect(batch_id, timeout_s=600)
        assert [rollout.state for rollout in ended] == [State.COMPLETED] * N, [str(each.failure) for each in ended]
        batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 300.0}}]})
        until(lambda: client.status(batch_id).stages[Stage.RUN][State.ACTIVE], "it runs", 60.0)
        client.cancel(batch_id)
        assert client.wait(batch_id, 600).n_cancelled == 1
    finally:
        over.set()
        flooding.join()


def test_listener_limits_pages_of_a_flood_and_recovers() -> None:
    with redis_server() as url:
        signals = Signals(url)
        listener = signals.listen(WAKE)
        redis = redis_client(url)
        assert redis is not None
        pipe = redis.pipeline(transaction=False)
        for _ in range(5_000):
            pipe.publish(WAKE, "x")
        pipe.execute()
        assert 0 < len(listener.wait(10.0)) <= 2_000

        def receives() -> bool:
            signals.wake()
            return listener.wait(0.1) == [""]

        # the rest of it is dropped, and later messages are received
        until(receives, "it listens again", 30.0)
        listener.close()
        signals.close()
        redis.close()
