"""`farm engines …`: the display of engines, without their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from farm.cli import doctor
from farm.cli.console import console
from farm.cli.engines import print_engines
from farm.cli.main import main
from farm.cli.readiness import CheckResult
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineState, StoredEngine
from farm.settings import Settings
from farm.store import llm_engines
from farm.store.database import Store
from tests.doubles import EngineDouble
from tests.secret_keys import key_of
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

URL = "http://a:8000/v1"


@pytest.fixture
def farm_url(sqlite_store: Store) -> str:
    return sqlite_store.url


def run(farm_url: str, *words: str) -> str:
    result = CliRunner().invoke(main, ["engines", words[0], "--url", farm_url, *words[1:]])
    assert result.exit_code == 0, result.output
    return result.output


def listed(farm_url: str) -> list[StoredEngine]:
    store = Store(farm_url)
    try:
        found = store.read(llm_engines.listing)
        return [replace(each, key=key_of(store).unseal(each.key)) for each in found]
    finally:
        store.close()


def test_engines_are_added_drained_removed_and_cleared(farm_url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    run(farm_url, "add", URL, "--model", "m", "--key-file", str(tmp_path / "key"), "--tool-format", "hermes")
    run(farm_url, "add", "http://b:8000")
    assert listed(farm_url) == [
        StoredEngine(URL, "m", "secret", tool_format="hermes"),
        StoredEngine("http://b:8000/v1"),
    ]
    run(farm_url, "drain", URL)
    assert listed(farm_url)[0].state == "draining"
    run(farm_url, "remove", URL)
    assert run(farm_url, "clear") == "1 engines removed\n"
    assert listed(farm_url) == []


def test_batch_for_an_existing_engine_keeps_its_settings(farm_url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "batch").write_text('{"data_source": "chat", "fields": {"question": "1 + 1?"}}\n')
    run(farm_url, "add", URL, "--key-file", str(tmp_path / "key"))
    for engine in (URL.removesuffix("/v1"), "http://b:8000/v1"):
        words = ["submit", str(tmp_path / "batch"), "--engine", engine, "--url", farm_url]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    assert [(each.url, each.key) for each in listed(farm_url)] == [(URL, "secret"), ("http://b:8000/v1", "none")]


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    """An engine that refuses requests without its key."""
    with serving(EngineDouble(Script([]), key="secret", model="tiny").app()) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def web_page() -> Iterator[str]:
    """A server that is not an engine."""
    page = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("hello"))])
    with serving(page) as url:
        yield f"{url}/v1"


def test_added_engine_is_probed_once(farm_url: str, tmp_path: Path, keyed: str, web_page: str) -> None:
    (tmp_path / "key").write_text("secret\n")
    key = ("--key-file", str(tmp_path / "key"))
    assert "answers with status 401: does it need a key (--key-file)?" in run(farm_url, "add", keyed)
    assert "answers here; no node has probed it yet" in run(farm_url, "add", keyed, *key)
    assert "it does not serve 'huge', but tiny" in run(farm_url, "add", keyed, *key, "--model", "huge")
    assert "is not OpenAI-compatible: does the address end in /v1?" in run(farm_url, "add", web_page)
    assert "does not answer from here" in run(farm_url, "add", "http://127.0.0.1:9/v1")
    assert "secret" not in run(farm_url, "list")


def test_invalid_arguments_are_one_line_errors(farm_url: str) -> None:
    for words in (["remove", URL], ["add", "nonsense"], ["pause", URL]):
        result = CliRunner().invoke(main, ["engines", words[0], "--url", farm_url, *words[1:]])
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")


def test_table_shows_state_and_trouble_without_keys() -> None:
    info = EngineInfo(kind="vllm", version="0.32.0", model="found", token_in="generate", token_out=True, control=True)
    paused = StoredEngine(
        URL, key="secret", info=info, paused="drain", paused_by="host/7", paused_s=340.0, n_orders=1, version="7"
    )
    broken = StoredEngine("http://b/v1", "m", state="draining", failure="does not answer [/]")
    console.width = 300
    with console.capture() as capture:
        print_engines([EngineState(paused, 3, 4096), EngineState(broken, 0, 0)])
    shown = capture.get()
    for words in ("vllm 0.32.0", "found", "yes (generate)", "3", "4096", "7 (has none)", "does not answer [/]"):
        assert words in shown
    assert "active, paused (drain) for 340 s by host/7, not ordered yet" in shown
    assert "draining" in shown
    assert "secret" not in shown


def test_doctor_reports_engines_that_are_out_and_long_pauses(farm_url: str) -> None:
    def finding() -> CheckResult:
        return next(each for each in doctor.examine(Settings(), farm_url, "") if each.what == "engines")

    store = Store(farm_url)
    try:
        assert "farm engines add" in finding().remedy
        store.write(lambda connection: llm_engines.add(connection, StoredEngine(URL), key_of(store)))
        assert not finding().ok, "it has not been probed"
        assert "has not answered any node yet" in finding().detail
        store.write(lambda connection: llm_engines.set_info(connection, URL, EngineInfo(model="m")))
        assert finding().ok
        store.write(lambda connection: llm_engines.set_failure(connection, URL, "does not answer"))
        assert not finding().ok
        assert "does not answer" in finding().detail
        store.write(lambda connection: llm_engines.set_paused(connection, "drain", "host/7", None))
        long_ago = llm_engines.engines.update().values(paused_at=llm_engines.engines.c.paused_at - 1000)
        store.write(lambda connection: connection.execute(long_ago) and None)
        # and the time that the database has taken since
        assert re.search(r"paused for 1\d{3} s by host/7", finding().detail)
        assert "farm engines resume" in finding().remedy
    finally:
        store.close()
