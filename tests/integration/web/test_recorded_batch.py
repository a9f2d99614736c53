"""`farm web --demo`: the recorded batch in every view, for everybody and read-only; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import farm
from examples.record_demo import record
from farm.client.local import LocalFarm
from farm.configuration.service_urls import sqlite_url
from farm.notifications import Signals
from farm.store.backups.backup import read_backup, restore
from farm.store.database import Store
from farm.web.recorded_batch import FILE, recorded_store
from tests.integration.web.hostile_pages import VIEWS, ParsedPage
from tests.secret_keys import key_of
from tests.services.preloaded import opened

LARGEST = 400_000
"""The limit in bytes of the recording, which is part of each wheel."""


def command(folder: Path, *options: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    (folder / "temporary").mkdir(exist_ok=True)
    env |= {"FARM_HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
    return opened("farm.cli.main", ["web", *options], env, folder)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the command, and the page's address that it prints."""
    process = command(tmp_path, "--demo")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"page +(http://127\.0\.0\.1:\d+/web)/ \(a recorded batch, read-only", line)
        assert found, (line, process.poll())
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def batch_in(page: str) -> str:
    return next(
        str(link).rpartition("/")[2]
        for tag, values in ParsedPage(page).tags
        if tag == "a" and (link := values.get("href") or "").startswith("/web/batches/")
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_view_works_without_a_farm_and_leaves_no_files(
    running: tuple[subprocess.Popen[str], str], tmp_path: Path, number: signal.Signals
) -> None:
    process, address = running
    # a cookie of a farm on another port of this address is ignored
    with httpx2.Client(base_url=address, cookies={"farm_key": "of another farm"}) as browser:
        batch_id = batch_in(browser.get("/").text)
        for view in VIEWS:
            answer = browser.get(view.format(b=batch_id))
            assert answer.status_code == 200, (view, answer.text)
        tokens = browser.get(f"/rollouts/{batch_id}.0.0/tokens?by=1").text
        assert 'class="tokens by"' in tokens, "advantages are shown over the tokens"
        lines = browser.get(f"/batches/{batch_id}/rollouts.jsonl").text.splitlines()
        assert {json.loads(line)["rollout_id"].partition(".")[0] for line in lines} == {batch_id}
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")
    assert [each.name for each in tmp_path.rglob("*")] == ["temporary"]


def test_demo_refuses_changes_and_api_requests(running: tuple[subprocess.Popen[str], str]) -> None:
    _, address = running
    with httpx2.Client(base_url=address) as browser:
        batch_id = batch_in(browser.get("/").text)
        for order in ("cancel", "rescore"):
            answer = browser.post(f"/orders/{order}", data={"id": batch_id, "back": "/"})
            assert (answer.status_code, "has the scope read" in answer.text) == (403, True)
        for path in ("/sign-in", "/sign-out"):
            answer = browser.post(path, data={"key": "x"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/web/")
            assert "set-cookie" not in answer.headers
        assert httpx2.get(address.replace("/web", "/v1/batches")).status_code == 401


def test_command_without_demo_names_the_alternative(tmp_path: Path) -> None:
    output, errors = command(tmp_path).communicate(timeout=60)
    assert output == ""
    assert "Error: --demo is required; `farm api` serves the page of a farm" in errors


def test_recording_is_small_and_contains_no_key(tmp_path: Path) -> None:
    assert FILE.stat().st_size < LARGEST
    with contextlib.closing(LocalFarm(recorded_store(tmp_path), Signals(""), 1)) as client:
        (batch_id,) = client.recent(10)
        status = client.status(batch_id)
        assert status.done
        assert status.n_completed == status.n_rollouts > 20
        assert client.violations(batch_id) == []
        assert not client.access.keys()
        assert not client.access.orders()
        assert not client.engines()


def test_script_records_only_an_ended_batch(tmp_path: Path) -> None:
    made = tmp_path / "made.db.gz"
    recorded_store(tmp_path).close()
    farm_store = Store(sqlite_url(tmp_path / "farm.db"))
    restore(farm_store, key_of(farm_store), read_backup(tmp_path / "recorded_batch.db"), 60.0)
    with contextlib.closing(LocalFarm(farm_store, Signals(""), 10)) as client:
        (ended,) = client.recent(10)
        live = client.submit({"instances": [{"data_source": "noop", "fields": {}}]})
        url = client.store.url
        with pytest.raises(farm.InvalidRequest, match="has not ended"):
            record(url, live, made)
        assert not made.exists()
        record(url, ended, made)
        before = [(each.rollout_id, each.reward) for each in client.rollouts(ended)]
    with contextlib.closing(LocalFarm(recorded_store(tmp_path, made), Signals(""), 10)) as client:
        assert client.recent(10) == [ended]
        assert [(each.rollout_id, each.reward) for each in client.rollouts(ended)] == before
        assert not client.access.orders()
