"""Secrets are encrypted in the store: processes with the farm's key decrypt them, and others fail at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from farm.callers import Caller, Scope, acting_for
from farm.client.local import LocalFarm
from farm.errors import Forbidden, InvalidRequest, NotAllowed
from farm.notifications import Signals
from farm.records.engine_state import StoredEngine
from farm.settings import settings
from farm.store import batches, llm_engines
from farm.store.database import Store
from tests.secret_keys import key_of
from tests.services.api import KEY, served
from tests.services.farms import NOOP
from tests.services.preloaded import farm_command

URL = "http://127.0.0.1:9/v1"
REQUEST: dict[str, Any] = {
    "instances": [NOOP, NOOP | {"engine_url": URL, "engine_key": "of-an-instance"}],
    "engine_url": URL,
    "engine_key": "of-the-batch",
    "roles": {"judge": {"engine_url": URL, "engine_key": "of-a-role"}},
    "secrets": {"TOKEN": "of-a-task"},
}
SECRETS = ("of-an-instance", "of-the-batch", "of-a-role", "of-a-task", "of-an-engine", "of-a-protocol")


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1000)


@pytest.fixture
def variables() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    settings.cache_clear()


def key_file(store: Store) -> Path:
    return Path(str(store.engine.url.database)).parent / "secret_key"


def stored(store: Store, batch_id: str) -> dict[str, Any]:
    return store.read(lambda connection: batches.request_of(connection, batch_id))


def secrets_of(request: dict[str, Any]) -> set[str]:
    engines = [*request["engines"], *request["roles"].values()]
    return {*(engine["engine_key"] for engine in engines), *request["secrets"].values()}


def test_database_and_responses_contain_no_plain_secret(service: LocalFarm, sqlite_store: Store) -> None:
    with served(service, speak=("prorl",)) as url, httpx2.Client(headers={"x-api-key": KEY}) as client:
        batch_id = client.post(f"{url}/v1/batches", json=REQUEST).json()["batch_id"]
        client.post(f"{url}/v1/engines", json={"url": URL, "key": "of-an-engine"})
        client.post(f"{url}/prorl/start")
        client.post(f"{url}/prorl/add_llm_server", json={"address": URL})
        paths = ["", "/rollouts", "/ended", "/conservation"]
        replies = [client.get(f"{url}/v1/batches/{batch_id}{path}").text for path in paths]
        replies += [client.get(f"{url}/v1/{path}").text for path in ("batches", "engines", "log", "doctor", "nodes")]
        replies.append(client.post(f"{url}/v1/engines/chosen", json={}).text)
    folder = key_file(sqlite_store).parent
    written = b"".join(path.read_bytes() for path in folder.iterdir() if path.name.startswith("farm.db"))
    for secret in SECRETS:
        assert secret not in "".join(replies)
        assert secret.encode() not in written
    assert "sealed:" not in "".join(replies)
    opened_again = key_of(sqlite_store).unseal_request(stored(sqlite_store, batch_id))
    assert secrets_of(opened_again) == {"of-an-instance", "of-the-batch", "of-a-role", "of-a-task"}
    assert stat.S_IMODE(key_file(sqlite_store).stat().st_mode) == 0o600


def test_store_without_secrets_needs_no_key(service: LocalFarm, sqlite_store: Store) -> None:
    service.submit({"instances": [NOOP]})
    service.add_engine(URL)
    assert not key_file(sqlite_store).exists()
    sqlite_store.read(key_of(sqlite_store).check)


def test_concurrent_first_encryptions_create_one_key(service: LocalFarm, sqlite_store: Store) -> None:
    others = [Store(sqlite_store.url) for _ in range(4)]

    def add(number: int) -> None:
        engine = StoredEngine(f"http://e{number}:1", key=f"key-{number}")
        others[number % 4].write(lambda connection: llm_engines.add(connection, engine, key_of(sqlite_store)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(12)))
    for each in others:
        each.close()
    keys = {key_of(sqlite_store).unseal(state.engine.key) for state in service.engines()}
    assert keys == {f"key-{number}" for number in range(12)}


def test_ciphertext_sent_by_a_client_is_encrypted_as_a_plain_secret(service: LocalFarm, sqlite_store: Store) -> None:
    service.add_engine(URL, key="of-an-engine")
    [state] = service.engines()
    service.add_engine("http://of-a-thief:1", key=state.engine.key[:500])
    copied = next(each.engine for each in service.engines() if "thief" in each.engine.url)
    assert key_of(sqlite_store).unseal(copied.key) == state.engine.key[:500]


@pytest.mark.parametrize("given", ["", "another-key-of-another-farm"])
def test_process_without_the_key_is_named_and_stores_nothing(
    service: LocalFarm, sqlite_store: Store, variables: pytest.MonkeyPatch, given: str
) -> None:
    batch_id = service.submit(REQUEST)
    key_file(sqlite_store).rename(key_file(sqlite_store).with_name("elsewhere"))
    variables.setenv("FARM_SECRET_KEY", given)
    variables.setenv("FARM_NODE", "node-7")
    settings.cache_clear()
    with pytest.raises(NotAllowed, match=r"node node-7 has .* FARM_SECRET_KEY"):
        sqlite_store.read(key_of(sqlite_store).check)
    with pytest.raises(NotAllowed, match="node-7"):
        key_of(sqlite_store).unseal_request(stored(sqlite_store, batch_id))
    keyless = LocalFarm(sqlite_store, Signals(""), 1000)
    with pytest.raises(NotAllowed, match="node-7"):
        keyless.submit(REQUEST)
    with pytest.raises(NotAllowed, match="node-7"):
        keyless.add_engine(URL, key="k")
    assert (len(service.batches()), len(service.engines())) == (1, 0)
    assert not key_file(sqlite_store).exists()
    variables.setenv("FARM_SECRET_KEY", key_file(sqlite_store).with_name("elsewhere").read_text())
    settings.cache_clear()
    assert secrets_of(key_of(sqlite_store).unseal_request(stored(sqlite_store, batch_id)))


def test_too_short_secret_key_is_refused(sqlite_store: Store, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("FARM_SECRET_KEY", "short")
    settings.cache_clear()
    with pytest.raises(InvalidRequest, match="FARM_SECRET_KEY"):
        LocalFarm(sqlite_store, Signals(""), 1000).add_engine(URL, key="k")


@pytest.mark.parametrize("part", ["node", "api"])
def test_process_with_a_wrong_secret_key_exits_at_start(
    sqlite_store: Store, service: LocalFarm, part: str, tmp_path: Path
) -> None:
    service.add_engine(URL, key="of-an-engine")
    env = os.environ | {
        "FARM_STORE_URL": sqlite_store.url,
        "FARM_SECRET_KEY": "another-key-of-another-farm",
        "FARM_HOME": str(key_file(sqlite_store).parent),
        "FARM_BROKER_URL": "redis://127.0.0.1:9/0",
        "FARM_NODE": "node-8",
    }
    log = tmp_path / "part.log"
    code = farm_command([part, *(["--port", "0"] if part == "api" else [])], env, log).wait(120)
    assert code == 1, log.read_text()
    assert "node node-8 has a different secret key than the farm" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_variable_reference_is_resolved_by_the_node_and_stored_as_reference(
    service: LocalFarm, sqlite_store: Store, variables: pytest.MonkeyPatch
) -> None:
    batch_id = service.submit({"instances": [NOOP], "engine_url": URL, "engine_key": "env:TRAINER_KEY"})
    service.add_engine(URL, key="env:TRAINER_KEY")
    with pytest.raises(NotAllowed, match="no environment variable TRAINER_KEY"):
        key_of(sqlite_store).unseal_request(stored(sqlite_store, batch_id))
    variables.setenv("TRAINER_KEY", "of-the-node")
    [engine] = key_of(sqlite_store).unseal_request(stored(sqlite_store, batch_id))["engines"]
    assert engine["engine_key"] == "of-the-node"
    [state] = service.engines()
    assert state.engine.key == "env:TRAINER_KEY"
    assert key_of(sqlite_store).unseal(state.engine.key) == "of-the-node"
    assert not key_file(sqlite_store).exists()


@pytest.mark.parametrize("name", ["FARM_STORE_URL", "FARM_SECRET_KEY", "", "A-B", "A=B", "1A"])
def test_reference_to_farm_variables_is_refused(service: LocalFarm, name: str) -> None:
    with pytest.raises(InvalidRequest, match="env:NAME"):
        service.add_engine(URL, key=f"env:{name}")
    with pytest.raises(InvalidRequest, match="env:NAME"):
        service.submit({"instances": [NOOP], "secrets": {"A": f"env:{name}"}})
    assert service.batches() == []


def test_variable_reference_requires_the_operate_scope(service: LocalFarm) -> None:
    request = {"instances": [NOOP], "engine_url": URL, "engine_key": "env:HOME"}
    with acting_for(Caller("trainer", (Scope.SUBMIT,))), pytest.raises(Forbidden, match="operate"):
        service.submit(request)
    with acting_for(Caller("team", (Scope.SUBMIT, Scope.OPERATE))):
        assert service.submit(request)
