"""A farm on a shared machine: other users cannot read it, command it or see its secrets in `ps`."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import farm
from farm.cli.main import main
from farm.embedded.embedded_farm import Embedded
from farm.errors import NotAllowed
from farm.home import known_key
from farm.settings import Settings, settings
from tests.services.api import killable_api
from tests.services.commands import output_of
from tests.services.farms import NOOP, embedded, farm_folder, flower_request, processes_of, until


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        (made / "home").mkdir(exist_ok=True)
        # as with the umask of a team
        (made / "home").chmod(0o777)
        yield made


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Embedded]:
    with embedded(folder, flower=True) as started, farm.connect(started.home) as client:
        client.wait(client.submit({"instances": [NOOP]}), timeout_s=600)
        yield started


def answer_to(request: urllib.request.Request | str) -> tuple[int, bytes]:
    """Return status and body; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, b""
    except OSError:
        return 0, b""


def test_files_in_the_home_are_private_to_their_owner(here: Embedded) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (here.home, *here.home.glob("*"))}
    assert modes[here.home] == 0o700
    names = {path.name for path in modes}
    assert {"farm.db", "farm.db-wal", "address.json", "api_key", "logs"} <= names
    secret = {path for path in modes if path.is_file() and path.name != "lock"}
    assert {oct(modes[path]) for path in secret} == {"0o600"}


def test_no_key_appears_in_ps(here: Embedded, folder: Path) -> None:
    key = known_key(Settings(home=here.home))
    lines = processes_of(folder)
    assert any("flower" in line for line in lines)
    assert [line for line in lines if key in line] == []


def test_flower_requires_the_key(here: Embedded) -> None:
    until(lambda: answer_to(here.flower_url)[0], "Flower answers")
    for path in ("/", "/workers", "/tasks", "/broker", "/api/tasks", "/api/workers", "/metrics"):
        assert answer_to(f"{here.flower_url}{path}")[0] == 401, path
    assert answer_to(flower_request(f"{here.flower_url}/api/workers", here.home))[0] == 200
    # probes have no key, and get nothing else
    assert answer_to(f"{here.flower_url}/healthcheck") == (200, b"OK")


def test_api_key_is_found_only_by_clients_of_the_same_home(
    here: Embedded, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_user(home: Path) -> None:
        monkeypatch.setenv("FARM_HOME", str(home))
        settings.cache_clear()

    try:
        with killable_api(here.home, folder / "api.log", key="") as api:
            until(api.listens, "the API listens")
            as_user(here.home)
            with farm.connect(api.url) as client:
                assert len(client.recent()) == 1
            as_user(folder / "of-somebody-else")
            with pytest.raises(NotAllowed, match="needs a key"):
                farm.connect(api.url)
            assert "needs a key" in output_of(main, "cancel", "b0", "--url", api.url, code=1)
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_metrics_require_the_key(here: Embedded) -> None:
    env = os.environ | {"FARM_HOME": str(here.home), "FARM_API_KEY": ""}
    command = [str(Path(sys.executable).parent / "farm"), "metrics", "--port", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        key = known_key(Settings(home=here.home))
        for shown, status in ((None, 401), ("Bearer x", 401), (f"Bearer {key}", 200)):
            request = urllib.request.Request(url, headers={} if shown is None else {"authorization": shown})
            assert answer_to(request)[0] == status
        assert b"farm_violations" in answer_to(request)[1]
        served.terminate()
        assert served.wait(600) == 0
