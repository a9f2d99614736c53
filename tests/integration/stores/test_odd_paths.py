"""Paths with special characters of settings, addresses and templates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from farm.embedded.own_redis import start_redis
from farm.errors import InvalidRequest
from farm.notifications import Signals
from farm.scheduler.broker import check_broker
from farm.settings import Settings
from farm.store import migrations
from farm.store.database import Store

NAMES = (
    "100%",
    "%(here)s",
    "%s",
    "p%41",
    "a b",
    "a#b",
    "é",
    "q'q",
    'x"y',
    "$HOME",
    "e&f",
    "g;h",
    "[x]",
    "c:d",
    "b\\s",
    "a?b",
)


@pytest.mark.parametrize("name", NAMES)
def test_migrations_and_store_work_in_a_path_with_special_characters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / name
    shutil.copytree(migrations.scripts(), place / "alembic")
    monkeypatch.setattr(migrations, "scripts", lambda: place / "alembic")
    store = Store(Settings(home=place).database_url)
    try:
        migrations.migrate(store)
        migrations.check(store)
    finally:
        store.close()
    assert (place / "farm.db").exists()


@pytest.mark.parametrize("name", NAMES)
def test_redis_socket_works_in_a_path_with_special_characters(name: str, tmp_path: Path) -> None:
    child, url = start_redis(tmp_path / name)
    try:
        check_broker(url)
        signals = Signals(url)
        signals.check()
        signals.close()
    finally:
        child.terminate()


def test_question_mark_in_a_sqlite_path_is_refused(tmp_path: Path) -> None:
    """The database would be another file, `a`, outside the folder."""
    with pytest.raises(InvalidRequest, match=r"store_url: the file's path has a `\?`, .*write %3F"):
        Store(f"sqlite:///{tmp_path}/a?b/farm.db")
    assert not list(tmp_path.iterdir())
