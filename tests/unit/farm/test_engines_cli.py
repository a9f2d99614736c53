"""`farm engines …`: what a person sees of the engines, and never their keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from farm import doctor
from farm.cli import main
from farm.engine import EngineInfo
from farm.engines import EngineState
from farm.engines_cli import table
from farm.settings import Settings
from farm.store import engines
from farm.store.engine import Store
from farm.store.engines import Engine

URL = "http://a:8000/v1"


@pytest.fixture
def farm_url(sqlite_store: Store) -> str:
    return sqlite_store.url


def run(farm_url: str, *words: str) -> str:
    found = CliRunner().invoke(main, ["engines", words[0], "--url", farm_url, *words[1:]])
    assert found.exit_code == 0, found.output
    return found.output


def listed(farm_url: str) -> list[Engine]:
    store = Store(farm_url)
    try:
        return store.read(engines.listing)
    finally:
        store.close()


def test_engines_are_added_drained_removed_and_cleared(farm_url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    run(farm_url, "add", URL, "--model", "m", "--key-file", str(tmp_path / "key"), "--tool-format", "hermes")
    run(farm_url, "add", "http://b:8000")
    assert listed(farm_url) == [Engine(URL, "m", "secret", tool_format="hermes"), Engine("http://b:8000/v1")]
    run(farm_url, "drain", URL)
    assert listed(farm_url)[0].state == "draining"
    run(farm_url, "remove", URL)
    assert run(farm_url, "clear") == "1 engines removed\n"
    assert listed(farm_url) == []


def test_a_batch_for_an_engine_that_is_there_leaves_its_settings(farm_url: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "batch").write_text('{"data_source": "chat", "fields": {"question": "1 + 1?"}}\n')
    run(farm_url, "add", URL, "--key-file", str(tmp_path / "key"))
    for engine in (URL.removesuffix("/v1"), "http://b:8000/v1"):
        words = ["submit", str(tmp_path / "batch"), "--engine", engine, "--url", farm_url]
        found = CliRunner().invoke(main, words)
        assert found.exit_code == 0, found.output
    assert [(each.url, each.key) for each in listed(farm_url)] == [(URL, "secret"), ("http://b:8000/v1", "none")]


def test_what_cannot_be_is_one_line(farm_url: str) -> None:
    for words in (["remove", URL], ["add", "nonsense"], ["pause", URL]):
        found = CliRunner().invoke(main, ["engines", words[0], "--url", farm_url, *words[1:]])
        assert found.exit_code == 1
        assert found.output.startswith("Error: ")


def test_the_table_says_what_they_are_and_what_is_wrong_and_no_key() -> None:
    info = EngineInfo(kind="vllm", version="0.32.0", model="found", token_in="generate", token_out=True, control=True)
    paused = Engine(
        URL, key="secret", info=info, paused="drain", paused_by="host/7", paused_s=340.0, n_orders=1, version="7"
    )
    broken = Engine("http://b/v1", "m", state="draining", failure="does not answer [/]")
    console = Console(width=300, record=True)
    console.print(table([EngineState(paused, 3, 4096), EngineState(broken, 0, 0)]))
    shown = console.export_text()
    for words in ("vllm 0.32.0", "found", "yes (generate)", "3", "4096", "7 (told none)", "does not answer [/]"):
        assert words in shown
    assert "active, paused (drain) for 340 s by host/7, not told yet" in shown
    assert "draining" in shown
    assert "secret" not in shown


def test_the_doctor_finds_engines_that_are_out_and_pauses_that_last(farm_url: str) -> None:
    def finding() -> doctor.Finding:
        return next(each for each in doctor.examine(Settings(), farm_url, "") if each.what == "engines")

    store = Store(farm_url)
    try:
        assert "farm engines add" in finding().mend
        store.write(lambda connection: engines.add(connection, Engine(URL)))
        assert finding().ok
        store.write(lambda connection: engines.set_failure(connection, URL, "does not answer"))
        assert not finding().ok
        assert "does not answer" in finding().detail
        store.write(lambda connection: engines.set_paused(connection, "drain", "host/7", None))
        long_ago = engines.engines.update().values(paused_at=engines.engines.c.paused_at - 1000)
        store.write(lambda connection: connection.execute(long_ago) and None)
        assert "paused for 1000 s by host/7" in finding().detail
        assert "farm engines resume" in finding().mend
    finally:
        store.close()
