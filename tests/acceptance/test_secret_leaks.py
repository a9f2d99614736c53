"""Secrets of a farm and of its batches appear only where they are used.

One farm has a distinctive secret in each possible place. It fails in many ways, with servers that repeat what they were
sent. Then everything that it shows, answers, logs, exports and stores is searched.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import MetaData, make_url, select

import farm
from farm.cli.main import main
from farm.client.farm import Farm
from farm.embedded.own_redis import start_redis_at
from farm.notifications import redis_client
from farm.records.rollout import Rollout, Stage
from farm.settings import Settings, settings
from farm.store.database import Store
from testkit.postgres import postgres_database
from tests.doubles import EngineDouble
from tests.integration.tasks.secret_plugin import installed_in
from tests.integration.tasks.task_plugin import known_here
from tests.services.commands import output_of
from tests.services.farms import QUICK, PreloadedFarm, farm_folder, until
from tests.services.servers.broker import free_ports
from workers.testing.serving import serving

NAMES = (
    *("api_key", "secret_key", "policy_key", "search_key", "search_login", "webhook_secret", "webhook_token"),
    *("broker_login", "store_login", "index_login", "build_login", "registry_login", "proxy_login", "otel_login"),
    *("added_key", "batch_key", "instance_key", "judge_key", "row_secret", "hook_token"),
)
SECRET = {name: f"leak{name.replace('_', '')}{secrets.token_hex(6)}" for name in NAMES}


class _EchoHandler(BaseHTTPRequestHandler):
    """Refuses everything, and repeats what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length).decode(errors="replace")
        text = json.dumps({"error": {"message": f"wrong key: {self.path} {dict(self.headers)} {body}"}}).encode()
        self.send_response(401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET  # noqa: N815
    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def repeating() -> Iterator[str]:
    """Yield the host and port of a server that repeats what it is sent."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _EchoHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def login(name: str, place: str) -> str:
    return f"http://somebody:{SECRET[name]}@{place}"


def settings_of(peer: str) -> dict[str, str]:
    """Return every setting and variable of a node that holds a secret."""
    of_farm = {name: SECRET[name] for name in ("api_key", "secret_key", "policy_key", "search_key", "webhook_secret")}
    return {f"FARM_{name.upper()}": value for name, value in of_farm.items()} | {
        "FARM_SEARCH": f"http:{login('search_login', peer)}/search",
        "FARM_WEBHOOK_URL": f"http://{peer}/hook?token={SECRET['hook_token']}",
        "FARM_OTEL_ENDPOINT": login("otel_login", peer),
        "FARM_BUILD_ENV": json.dumps({"PIP_INDEX_URL": login("build_login", peer)}),
        "PIP_INDEX_URL": f"{login('index_login', peer)}/simple",
        "PIP_RETRIES": "0",
        "APPTAINER_DOCKER_USERNAME": "somebody",
        "APPTAINER_DOCKER_PASSWORD": SECRET["registry_login"],
        "ftp_proxy": login("proxy_login", peer),
    }


@dataclass(frozen=True)
class SearchedFarm:
    """A farm, its batch, and its address for the commands."""

    folder: Path
    client: Farm
    started: PreloadedFarm
    env: dict[str, str]
    rollouts: dict[str, Rollout]
    processes: str


def requests(peer: str) -> dict[str, dict[str, Any]]:
    """Return rollouts that print their secrets, and others that fail, each in a different place."""
    shown = {"commands": ["env; cat /proc/*/environ; echo $TOKEN"], "env": {"TOKEN": "${ROW}"}}
    url = f"http://{peer}/v1"
    secret = {"secrets": {"ROW": SECRET["row_secret"]}}
    chat = {"data_source": "chat", "fields": {"question": "?", "expected": "x"}}
    return {
        "shown": {"instances": [{"data_source": "stepped", "fields": shown}], **secret},
        "fails": {"instances": [{"data_source": "plain", "fields": {**shown, "fails": "no ${ROW}"}}], **secret},
        "told": {
            "instances": [{"data_source": "plain", "fields": shown}],
            "agent": "telling",
            "roles": {"judge": {"engine_url": url, "engine_key": SECRET["judge_key"], "timeout_s": 2}},
            **secret,
        },
        "crashed": {
            "instances": [{"data_source": "plain", "fields": {**shown, "env": {"TOKEN": "${ROW}", "FAIL": "x"}}}],
            "agent": "telling",
            **secret,
        },
        "engine": {"instances": [chat], "engine_url": url, "engine_key": SECRET["batch_key"]},
        "instance": {"instances": [chat | {"engine_url": url, "engine_key": SECRET["instance_key"]}]},
        "search": {"instances": [{"data_source": "searched", "fields": {"commands": ["true"]}}], "agent": "searching"},
        "packages": {
            "instances": [{"data_source": "imaged", "fields": {"commands": ["true"], "packages": ["nothing==1"]}}]
        },
        "image": {
            "instances": [
                {"data_source": "imaged", "fields": {"commands": ["true"], "image": f"docker://{peer}/private:1"}}
            ],
            "webhook": {"url": f"http://{peer}/hook?token={SECRET['webhook_token']}"},
        },
    }


@pytest.fixture(scope="module")
def here(postgres_url: str, apptainer: Path) -> Iterator[SearchedFarm]:
    with ExitStack() as stack:
        folder = stack.enter_context(farm_folder())
        peer = stack.enter_context(repeating())
        (port,) = free_ports(1)
        redis = start_redis_at(port, SECRET["broker_login"], folder / "redis", folder / "redis.log")
        stack.callback(redis.terminate)
        database = make_url(stack.enter_context(postgres_database(postgres_url)))
        store_url = database.set(password=SECRET["store_login"]).render_as_string(hide_password=False)
        engine = stack.enter_context(serving(EngineDouble(key=SECRET["policy_key"]).app()))
        broker_url = f"redis://:{SECRET['broker_login']}@127.0.0.1:{port}/0"
        env = QUICK | installed_in(folder) | settings_of(peer)
        env |= {"FARM_POLICY_URL": f"{engine}/v1", "FARM_WARM_POOL": "0", "FARM_ENGINE_AWAY_S": "1"}
        own = Settings(home=folder / "home", scratch=folder / "scratch", store_url=store_url, broker_url=broker_url)
        options = ("--init", "4", "--run", "16", "--eval", "4")
        started = stack.enter_context(PreloadedFarm(own, node_options=options, flower=False, api=True, env=env))
        stack.enter_context(known_here(folder))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("FARM_API_KEY", SECRET["api_key"])
        settings.cache_clear()
        stack.callback(settings.cache_clear)
        client = stack.enter_context(farm.connect(started.api_url, first_s=60))
        client.add_engine(f"http://{peer}/v1", key=SECRET["added_key"])
        lasting = {"data_source": "plain", "fields": {"commands": ["sleep 1000"], "env": {"TOKEN": "${ROW}"}}}
        held = client.submit({"instances": [lasting], "secrets": {"ROW": SECRET["row_secret"]}})
        ids = {
            name: client.submit({"max_attempts": 1, "limits": {"run_s": 10}, **request})
            for name, request in requests(peer).items()
        }
        rollouts = {name: client.collect(id, timeout_s=300)[0] for name, id in ids.items()}
        until(lambda: any(each.stage is Stage.RUN for each in client.rollouts(held)), "the lasting one runs")
        processes = "\n".join(seen_by_others())
        client.cancel(held)
        own_env = {**env, "FARM_STORE_URL": store_url, "FARM_BROKER_URL": broker_url, "FARM_HOME": str(own.home)}
        yield SearchedFarm(folder, client, started, own_env, rollouts, processes)


def seen_by_others() -> list[str]:
    """Return every command line of the machine, and the variables of processes of other users than the farm's."""
    result = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.name != str(os.getpid()):
            try:
                result.append(process.joinpath("cmdline").read_bytes().decode(errors="replace"))
                if process.stat().st_uid != os.geteuid():
                    result.append(process.joinpath("environ").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return result


def leaks(text: str, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the secrets in a text, with their surroundings."""
    return {
        name: text[max(0, at - 300) : at + 60]
        for name, value in SECRET.items()
        if name not in but and (at := text.find(value)) >= 0
    }


def test_each_rollout_fails_or_succeeds_as_designed(here: SearchedFarm) -> None:
    failures = {name: rollout.failure.message for name, rollout in here.rollouts.items() if rollout.failure}
    assert {*failures} == {*("fails", "crashed", "engine", "instance", "search", "packages", "image")}, failures
    assert here.client.calls(here.rollouts["told"].rollout_id)
    assert leaks(str(failures)) == {}


def test_process_list_shows_no_secret_to_other_users(here: SearchedFarm) -> None:
    # a row's variables for its own sandbox are in that sandbox
    assert leaks(here.processes, but=("row_secret",)) == {}


def test_files_of_the_farm_contain_no_secret(here: SearchedFarm) -> None:
    # files that are meant to hold them, readable only by their owner
    private = {"address.json", "redis.conf"}
    found = {}
    for parent, _, names in os.walk(here.folder):
        for path in (Path(parent, name) for name in names):
            # the farm still runs, and removes sandboxes in between
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode) and path.name not in private and "cache" not in path.parts:
                    found[str(path.relative_to(here.folder))] = leaks(path.read_bytes().decode(errors="replace"))
    assert len(found) > 10
    assert {path: each for path, each in found.items() if each} == {}


def test_store_and_broker_contain_no_secret(here: SearchedFarm) -> None:
    store = Store(here.env["FARM_STORE_URL"])
    try:
        with store.engine.connect() as connection:
            tables = MetaData()
            tables.reflect(connection)
            rows = [str(row) for table in tables.sorted_tables for row in connection.execute(select(table))]
    finally:
        store.close()
    assert len(rows) > 50
    # the outbox must have the address
    assert leaks("\n".join(rows), but=("hook_token", "webhook_token")) == {}
    redis = redis_client(here.env["FARM_BROKER_URL"])
    assert redis is not None
    with redis:
        assert leaks(str([redis.dump(key) for key in redis.scan_iter()])) == {}


COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("ls",), ("log",), ("engines", "list"), ("doctor",), ("config",), ("metrics",), ("keys", "list")),
    *(("show", "ROLLOUT"), ("show", "--atif", "ROLLOUT"), ("artefacts", "ROLLOUT"), ("watch", "BATCH")),
    ("doctor", "--batch", "BATCH"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_print_no_secret(here: SearchedFarm, words: tuple[str, ...]) -> None:
    of_all = {"ROLLOUT", "BATCH"} & {*words}
    shown = list(here.rollouts.values()) if of_all else [here.rollouts["shown"]]
    for rollout in shown:
        if "--atif" in words and not here.client.calls(rollout.rollout_id):
            continue
        names = {"ROLLOUT": rollout.rollout_id, "BATCH": rollout.batch_id}
        output = output_of(main, *(names.get(word, word) for word in words), env=here.env)
        assert output
        assert leaks(output) == {}


PAGES = (
    *("/", "/batches/{id}", "/batches/{id}/rollouts", "/batches/{id}/rollouts.jsonl", "/batches/{id}/failures"),
    *("/batches/{id}/figures", "/rollouts/{id}", "/rollouts/{id}/tokens", "/rollouts/{id}/timeline", "/cluster"),
    *("/rollouts/{id}/trace.json", "/rollouts/{id}/page.html", "/alarms"),
)


def test_replies_pages_and_exports_contain_no_secret(here: SearchedFarm) -> None:
    shown = [here.rollouts[name] for name in ("told", "engine", "image")]
    key = SECRET["api_key"]
    with httpx2.Client(base_url=here.started.api_url, headers={"x-api-key": key}, timeout=60) as client:
        described = client.get("/openapi.json").json()["paths"]
        paths = {path for path, verbs in described.items() if "get" in verbs and "events" not in path}
        assert client.post("/web/sign-in", data={"key": key, "then": "/"}).status_code == 303
        paths |= {f"/web{path}" for path in PAGES}
        for number, rollout in enumerate(shown):
            for path in sorted(paths):
                if "{" not in path and number:
                    continue
                id = rollout.batch_id if "/batches/" in path else rollout.rollout_id
                reply = client.get(path.replace("{id}", id), params={"batch": id, "name": "telling.log"})
                assert leaks(reply.text) == {}, path
    told = here.rollouts["told"].rollout_id
    artefacts = here.client.artefacts(told)
    assert artefacts
    assert leaks(str([here.client.artefact(told, each.name) for each in artefacts])) == {}
