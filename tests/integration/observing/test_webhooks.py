"""Webhooks: an end is delivered at least once and signed, even after kills and outages; who may name which address."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

import farm
from farm.callers import Caller, Scope, acting_for
from farm.cli import doctor
from farm.client.local import LocalFarm
from farm.errors import Forbidden, InvalidRequest
from farm.notifications import Signals
from farm.observing.observer import AlarmLog, Observer
from farm.observing.webhook_sender import WebhookSender, signature
from farm.records.rollout import Stage, State
from farm.scheduler.dispatcher import Dispatcher
from farm.settings import Settings, settings
from farm.store.database import Store
from farm.store.rollouts import batches
from farm.store.webhooks import outbox
from testkit.deadline import LONG_S
from tests.contract.store.test_store import announce, place, run_to_end
from tests.contract.store.test_store_rescore import cancel, rescore
from tests.services.farms import NOOP, embedded, farm_folder, until
from tests.services.servers.webhook_receiver import Receiver, receiver

SECRET = "shared with the receiver"


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def submitted(store: Store, url: str, n_samples: int = 1) -> str:
    announce(store)
    request: dict[str, Any] = {"instances": [NOOP], "n_samples": n_samples, "webhook": {"url": url}}
    batch_id = LocalFarm(store, Signals(""), 1000).submit(request)
    place(store, batch_id)
    return batch_id


def observe(store: Store, url: str = "") -> None:
    Observer(store, lambda: True, webhook_url=url).look()


def send(store: Store) -> None:
    WebhookSender(store, lambda: True, SECRET).send()


def make_due(store: Store, age_s: float = 0.0) -> None:
    older = {"due_at": outbox.outbox.c.due_at - 7200, "created_at": outbox.outbox.c.created_at - age_s}
    store.write(lambda connection: connection.execute(update(outbox.outbox).values(**older)))


def test_end_of_a_batch_is_delivered_once_and_signed(store: Store, hook: Receiver) -> None:
    batch_id = submitted(store, hook.url, 2)
    run_to_end(store, f"{batch_id}.0.0", reward=0.5)
    observe(store)
    send(store)
    assert hook.messages == [], "one has not ended"
    cancel(store, f"{batch_id}.0.1")
    observe(store)
    observe(store)
    send(store)
    send(store)
    [(headers, body)] = hook.messages
    assert hook.bodies[0]["event"] == "batch_ended"
    reported = [hook.bodies[0][name] for name in ("batch_id", "n_rollouts", "n_completed", "mean_reward")]
    assert reported == [batch_id, 2, 1, 0.5]
    assert headers["farm-signature"] == signature(SECRET, headers["farm-timestamp"], body)
    assert headers["farm-signature"] != signature("another", headers["farm-timestamp"], body)
    rescore(store, batch_id)
    place(store, batch_id)
    cancel(store, batch_id)
    observe(store)
    send(store)
    assert len(hook.messages) == 2, "it ended again"


def test_refused_message_is_retried_under_the_same_id(sqlite_store: Store, hook: Receiver) -> None:
    batch_id = submitted(sqlite_store, hook.url)
    cancel(sqlite_store, batch_id)
    observe(sqlite_store)
    for status in (500, 302, 404):
        hook.answers = status
        send(sqlite_store)
        send(sqlite_store)
        make_due(sqlite_store)
    [found] = sqlite_store.read(outbox.undelivered)
    assert (found.url, found.n, found.n_abandoned, found.error) == (hook.url, 1, 0, "it answered 404")
    hook.answers = 204
    send(sqlite_store)
    assert sqlite_store.read(outbox.undelivered) == []
    assert len({headers["farm-delivery"] for headers, _ in hook.messages}) == 1
    assert len(hook.messages) == 4, "once each time it is due, and no redirect is followed"


def test_message_refused_for_days_is_abandoned_and_shown_by_doctor(sqlite_store: Store) -> None:
    batch_id = submitted(sqlite_store, "http://127.0.0.1:1/hook")
    cancel(sqlite_store, batch_id)
    observe(sqlite_store)
    make_due(sqlite_store)
    send(sqlite_store)
    make_due(sqlite_store, age_s=4 * 86_400)
    send(sqlite_store)
    make_due(sqlite_store)
    assert sqlite_store.read(partial(outbox.due_messages, limit=10)) == []
    result = doctor._webhooks(Settings(), sqlite_store.url)
    assert not result.ok
    assert "http://127.0.0.1:1/..." in result.detail
    assert "1 of them given up after 3 days" in result.detail


def test_message_of_a_killed_sender_is_sent_by_the_next(sqlite_store: Store, hook: Receiver) -> None:
    batch_id = submitted(sqlite_store, hook.url)
    cancel(sqlite_store, batch_id)
    observe(sqlite_store)
    # it was posted, and its sender killed before it recorded that
    [message] = sqlite_store.read(partial(outbox.due_messages, limit=10))
    assert WebhookSender(sqlite_store, lambda: True)._refusal(message, b"{}") == ""
    send(sqlite_store)
    assert [headers["farm-delivery"] for headers, _ in hook.messages] == [message.message_id] * 2
    assert ["farm-signature" in headers for headers, _ in hook.messages] == [False, True], (
        "the first had no key to sign"
    )
    assert sqlite_store.read(partial(outbox.due_messages, limit=10)) == []


@pytest.mark.parametrize(("secret", "reported"), [(SECRET, 1), ("", 0)])
def test_farm_webhook_without_a_secret_sends_nothing(sqlite_store: Store, secret: str, reported: int) -> None:
    own = {"broker_url": "memory://", "webhook_url": "http://hooks.lab/", "webhook_secret": secret}
    options = settings().model_copy(update=own)
    dispatcher = Dispatcher(sqlite_store, Signals(""), options, "d")
    announce(sqlite_store)
    batch_id = LocalFarm(sqlite_store, Signals(""), 1000).submit({"instances": [NOOP]})
    cancel(sqlite_store, batch_id)
    next(each for each in dispatcher._threads if isinstance(each, Observer)).look()
    assert len(sqlite_store.read(partial(outbox.due_messages, limit=10))) == reported


@contextmanager
def dripping_receiver() -> Iterator[str]:
    """A receiver that begins an answer, and continues it for as long as anybody listens."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"x-more: x\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(drip, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LONG_S)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        server.close()
        loop.close()


def put_message(store: Store, url: str, form: str = outbox.ALARM, subject: str = "words") -> None:
    store.write(partial(outbox._put, form=form, subject=subject, url=url))


def test_failing_messages_are_kept_and_others_are_sent(sqlite_store: Store, hook: Receiver) -> None:
    announce(sqlite_store)
    batch_id = submitted(sqlite_store, hook.url)
    too_long = f"http://{'a' * 64}.lab/"
    with dripping_receiver() as slow:
        put_message(sqlite_store, slow)
        put_message(sqlite_store, "http://a..b/")
        put_message(sqlite_store, too_long)
        put_message(sqlite_store, "http://nobody.invalid/", "a form of a plug-in that this node lacks", batch_id)
        put_message(sqlite_store, hook.url)
        WebhookSender(sqlite_store, lambda: True, SECRET, timeout_s=10.0).send()
    assert [body["alarm"] for body in hook.bodies] == ["words"]
    refused = {each.url: each.error for each in sqlite_store.read(outbox.undelivered)}
    assert set(refused) == {slow, "http://a..b/", too_long, "http://nobody.invalid/"}
    assert refused[slow] == "no answer within 10 s"
    assert "installed: batch_ended, polar" in refused["http://nobody.invalid/"]


def test_due_messages_of_one_address_do_not_block_another(store: Store) -> None:
    for _ in range(12):
        put_message(store, "http://away.lab/")
    put_message(store, "http://other.lab/")
    due = [message.url for message in store.read(partial(outbox.due_messages, limit=4))]
    assert sorted(due) == ["http://away.lab/"] * 3 + ["http://other.lab/"]


def test_batch_with_an_unreadable_webhook_does_not_block_others(store: Store, hook: Receiver) -> None:
    broken, whole = submitted(store, hook.url), submitted(store, hook.url)
    of_another_version = update(batches).where(batches.c.batch_id == broken).values(request={"webhook": {"to": "?"}})
    store.write(lambda connection: connection.execute(of_another_version))
    for batch_id in (broken, whole):
        cancel(store, batch_id)
    observe(store)
    assert [message.subject for message in store.read(partial(outbox.due_messages, limit=10))] == [whole]


def test_alarms_during_a_store_outage_are_stored_afterwards(sqlite_store: Store) -> None:
    observer = Observer(sqlite_store, lambda: True, webhook_url="http://hooks.lab/")
    observer.start()
    sqlite_store.write(lambda connection: outbox.outbox.drop(connection))
    logging.getLogger("farm.any").error("ALARM first")
    with pytest.raises(Exception, match="no such table"):
        observer._put_alarms()
    logging.getLogger("farm.any").error("ALARM second")
    sqlite_store.write(lambda connection: outbox.outbox.create(connection))
    observer._put_alarms()
    observer.close()
    due = sqlite_store.read(partial(outbox.due_messages, limit=10))
    assert {message.subject for message in due} == {"first", "second"}


def test_log_record_with_invalid_arguments_is_ignored() -> None:
    alarms = AlarmLog()
    alarms.handle(logging.makeLogRecord({"msg": "ALARM of %s %s", "args": ("one",), "levelno": logging.ERROR}))
    assert alarms.take() == []


def test_alarms_are_sent_to_the_farm_webhook(sqlite_store: Store, hook: Receiver) -> None:
    observer = Observer(sqlite_store, lambda: True, webhook_url=hook.url)
    observer.start()
    logging.getLogger("farm.any").error("ALARM %s is broken", "something")
    logging.getLogger("farm.any").error("no alarm")
    observer.look()
    observer.close()
    send(sqlite_store)
    assert [(body["event"], body["alarm"]) for body in hook.bodies] == [("alarm", "something is broken")]


@pytest.mark.parametrize(
    ("url", "scopes", "error"),
    [
        ("http://hooks.lab/x", [Scope.SUBMIT], None),
        ("https://HOOKS.lab/x?y=1", [Scope.SUBMIT], None),
        ("http://10.0.0.7:8080/x", [Scope.SUBMIT], None),
        ("http://10.0.0.7/x", [Scope.SUBMIT], Forbidden),
        ("http://hooks.lab:6379/x", [Scope.SUBMIT], Forbidden),
        ("http://hooks.lab.evil.org/", [Scope.SUBMIT, Scope.OPERATE], Forbidden),
        ("http://169.254.169.254/latest/meta-data", [Scope.SUBMIT], Forbidden),
        ("http://169.254.169.254/latest/meta-data", [Scope.ADMIN], None),
        ("http://hooks.lab@169.254.169.254/", [Scope.ADMIN], InvalidRequest),
        ("http://169.254.169.254\\@hooks.lab/", [Scope.SUBMIT], (Forbidden, InvalidRequest)),
        ("file:///etc/passwd", [Scope.ADMIN], InvalidRequest),
        ("http://[::1/", [Scope.ADMIN], InvalidRequest),
        ("http://hooks.lab/\x00", [Scope.ADMIN], InvalidRequest),
    ],
)
def test_webhook_address_is_allowed_by_host_and_scope(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, url: str, scopes: list[Scope], error: Any
) -> None:
    monkeypatch.setenv("FARM_WEBHOOK_HOSTS", "hooks.lab, 10.0.0.7:8080")
    settings.cache_clear()
    try:
        with acting_for(Caller("someone", tuple(scopes))):
            if error is None:
                submitted(sqlite_store, url)
            else:
                with pytest.raises(error, match="webhook"):
                    submitted(sqlite_store, url)
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_running_farm_sends_to_both_addresses(hook: Receiver) -> None:
    env = {"FARM_WEBHOOK_URL": f"{hook.url}/all", "FARM_WEBHOOK_SECRET": SECRET}
    with (
        farm_folder() as folder,
        embedded(folder, flower=False, **env) as running,
        farm.connect(running.store_url, broker_url=running.broker_url) as client,
    ):
        batch_id = client.submit({"instances": [NOOP], "webhook": {"url": hook.url}})
        (rollout,) = client.collect(batch_id, timeout_s=600)
        assert (rollout.stage, rollout.state) == (Stage.EVAL, State.COMPLETED)
        until(lambda: len(hook.messages) >= 2, "both are told")
        assert {body["batch_id"] for body in hook.bodies} == {batch_id}
        assert all(headers["farm-signature"].startswith("sha256=") for headers, _ in hook.messages)
