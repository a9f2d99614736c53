"""The command line without a farm: imports, help, version, and one clear line for every mistake."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import click
import pytest

import farm
from farm.cli.main import COMMANDS, Commands, main
from farm.client.local import LocalFarm
from farm.errors import Conflict
from farm.store import llm_engines
from farm.store.batches import request_of
from farm.store.database import Store
from tests.services.commands import output_of

FARM = str(Path(sys.executable).parent / "farm")
HEAVY = {
    *(
        "sqlalchemy",
        "redis",
        "celery",
        "kombu",
        "numpy",
        "pydantic",
        "pydantic_settings",
        "rich",
        "httpx2",
        "starlette",
    ),
    *("prometheus_client", "yaml", "alembic", "workers", "orjson", "zstandard"),
}
ROOT = Path(__file__).parents[4]


def test_help_and_the_package_import_nothing_heavy() -> None:
    code = "import sys, farm; from farm.cli.main import main; main(['--help'], standalone_mode=False)"
    code += "; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Show a batch's progress" in done.stdout
    assert HEAVY & {*done.stderr.split()} == set()


def test_every_public_name_exists_and_is_known_to_type_checkers() -> None:
    tree = ast.parse(inspect.getsource(farm))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    shown = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {name for _, name in shown} == {*farm.__all__}
    for module, name in shown:
        assert getattr(farm, name) is getattr(sys.modules[str(module)], name)
    assert {*farm.__all__} <= {*dir(farm)}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        farm.nonsense  # type: ignore[attr-defined] # noqa: B018


def test_type_checkers_read_the_packages() -> None:
    assert (ROOT / "farm" / "py.typed").is_file()
    assert (ROOT / "workers" / "py.typed").is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_equals_its_line_in_the_list(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    assert inspect.cleandoc(str(command.help)).split("\n\n")[0].replace("\n", " ") == COMMANDS[name][1]


def test_version_and_short_help_are_printed() -> None:
    assert output_of(main, "--version").startswith("farm, version ")
    assert output_of(main, "-h") == output_of(main, "--help")
    assert output_of(main, "engines", "add", "-h").startswith("Usage: main engines add")
    assert "--grace" in output_of(main, "up", "-h"), "the node's options"


MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "a command with a typo": (["wach", "b1"], 2, "No such command 'wach'. Did you mean watch"),
    "no such command": (["frobnicate"], 2, "No such command 'frobnicate'. `farm --help` lists them."),
    "an option with a typo": (["submit", "{file}", "--n-sample", "2"], 2, "Did you mean '--n-samples'?"),
    "no file": (["submit", "nothere.jsonl"], 2, "'nothere.jsonl' does not exist"),
    "a file of Windows": (["submit", r"C:\problems.jsonl"], 2, "does not exist"),
    "a folder without tasks": (["submit", "{folder}"], 1, "contains no tasks"),
    "no file and no request": (["submit"], 2, "give a FILE with problems"),
    "a sample count that is none": (["submit", "{file}", "-n", "many"], 2, "'many' is not a valid integer"),
    "no farm yet": (["submit", "{file}"], 1, "FarmUnreachable: no farm was ever started in"),
    "no farm yet, to list": (["ls"], 1, "run `farm up`, or set FARM_STORE_URL"),
    "a request that is no file": (["submit", "--request", "nothere"], 2, "'nothere' does not exist"),
    "a setting that is none": (["submit", "{file}", "--set", "top_p"], 1, "--set: 'top_p' is not NAME=VALUE"),
    "an output of another kind": (["collect", "b0", "-o", "x.csv"], 1, "must end in .npz or .jsonl"),
    "an output without a folder": (["collect", "b0", "-o", "{folder}/no/b.npz"], 1, "there is no folder {folder}/no"),
    "groups in lines": (
        ["collect", "b0", "-o", "{folder}/b.jsonl", "--whole-groups"],
        1,
        "only .npz leaves groups out",
    ),
    "a database of another kind": (["ls", "--url", "mysql://h/d"], 1, "InvalidRequest: store_url: "),
    "a file as a farm": (["ls", "--url", "{file}"], 1, "FarmUnreachable: no farm was ever started in"),
    "an address that is none": (["ls", "--url", "http://"], 1, "InvalidRequest: url: must be an address"),
    "an API that is not there": (
        ["ls", "--wait", "0", "--url", "http://127.0.0.1:9/"],
        1,
        "no API of a farm answers at http://127.0.0.1:9",
    ),
    "a negative wait": (["ls", "--wait", "-1"], 2, "-1.0 is not in the range"),
    "a port that is none": (["metrics", "--port", "99999"], 2, "99999 is not in the range"),
    "an option of doctor with a typo": (["doctor", "--bach", "b0"], 2, "--bach b0: only --sandbox NAME"),
    "an engine that is no double": (["engine"], 2, "--scripted is required"),
    "no such handler": (
        ["handlers", "show", "maths"],
        1,
        "NotFound: there is no handler 'maths'; installed here:",
    ),
}


@pytest.mark.parametrize(("words", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_one_line(tmp_path: Path, words: list[str], code: int, expected: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"data_source": "noop", "fields": {}}\n')
    places = {"{file}": str(file), "{folder}": str(tmp_path)}

    def filled(word: str) -> str:
        for name, place in places.items():
            word = word.replace(name, place)
        return word

    env = dict.fromkeys(name for name in os.environ if name.startswith("FARM_")) | {"FARM_HOME": str(tmp_path / "home")}
    output = output_of(main, *map(filled, words), code=code, env=env)
    assert filled(expected) in output
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if line.startswith("Error: ")]) == 1
    assert not (tmp_path / "home").exists(), "a mistake creates nothing"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FARM_LEASE_S", "soon", "FARM_LEASE_S: "),
        ("FARM_MAX_OPEN", "0", "FARM_MAX_OPEN: "),
        ("FARM_IMAGE_CACHE", "always", "FARM_IMAGE_CACHE: "),
        ("FARM_STORE_URL", "postgres", "store_url: not a database URL"),
        ("FARM_STORE_URL", "mongodb://h/d", "store_url: "),
    ],
)
def test_wrong_variable_is_named(tmp_path: Path, name: str, value: str, expected: str) -> None:
    env = {"FARM_HOME": str(tmp_path), "FARM_STORE_URL": None, name: value}
    output = output_of(main, "ls", code=1, env=env)
    assert expected in output
    assert len(output.splitlines()) == 1


@pytest.fixture(scope="module")
def store_url(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A farm without nodes and engines."""
    path = tmp_path_factory.mktemp("store") / "farm.db"
    shutil.copy(migrated_sqlite, path)
    return f"sqlite:///{path}"


@pytest.mark.parametrize("name", ["math", "code", "swe", "chat", "noop"])
def test_example_of_a_handler_can_be_submitted(store_url: str, tmp_path: Path, name: str) -> None:
    schema, _, example = output_of(main, "handlers", "show", name).partition("\nexample, one line of a file")
    assert '"properties"' in schema
    (tmp_path / "example.jsonl").write_text(example.splitlines()[-1])
    submitted = output_of(main, "submit", str(tmp_path / "example.jsonl"), "--url", store_url).splitlines()
    assert re.fullmatch("b[0-9a-f]{10}", submitted[0])
    assert "no node runs: nothing runs until `farm up` or `farm node` is started" in submitted
    assert any(line.startswith("no engine is added") for line in submitted)


def test_batch_with_its_own_engine_needs_no_engine_of_the_farm(store_url: str, tmp_path: Path) -> None:
    problems, key = tmp_path / "problems.jsonl", tmp_path / "key"
    chat = {"data_source": "chat", "fields": {"question": "?"}}
    problems.write_text(json.dumps(chat))
    key.write_text("sk-secret\n")
    own = ("--engine-url", "http://trainer/v1", "--engine-key-file", str(key))
    output = output_of(main, "submit", str(problems), *own, "--url", store_url)
    assert "no engine is added" not in output
    refused = output_of(main, "submit", str(problems), "--engine-url", "ftp://trainer", "--url", store_url, code=1)
    assert "engine_url: 'ftp://trainer' is not an engine's address" in refused
    with farm.connect(store_url) as client:
        batch_id, of_farm = output.split()[0], client.submit({"instances": [chat]})
        half = client.submit({"instances": [chat, chat | {"engine_url": "http://trainer/v1"}]})
        client.add_engine("http://dead/v1")
        assert isinstance(client, LocalFarm)
        client.store.write(lambda connection: llm_engines.set_failure(connection, "http://dead/v1", "is dead"))
        warned = [bool(client.status(each).warnings) for each in (batch_id, of_farm, half)]
        client.clear_engines()
        # the same request is the same batch, also with another key
        request = {"instances": [chat], "engine_url": "http://trainer/v1", "idempotency_key": "step-1"}
        first = client.submit(request | {"engine_key": "sk-first"})
        assert client.submit(request | {"engine_key": "sk-second"}) == first
        with pytest.raises(Conflict):
            client.submit(request | {"engine_url": "http://other/v1"})
    assert warned == [False, True, True]


def test_starter_problems_can_be_submitted(store_url: str) -> None:
    submitted = output_of(main, "submit", str(ROOT / "examples" / "problems.jsonl"), "--url", store_url).splitlines()
    listed = [json.loads(line) for line in output_of(main, "ls", "--json", "--url", store_url).splitlines()]
    assert [(each["batch_id"], each["state"], each["data_sources"]) for each in listed][:1] == [
        (submitted[0], "queued", ["code", "math", "swe"])
    ]
    assert {"math", "code", "swe", "chat", "noop"} <= {*output_of(main, "handlers").split()}


def test_plugins_for_tests_are_not_installed_in_production() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([FARM, "handlers"], env=env, capture_output=True, text=True, check=True)
    words = {*done.stdout.replace(",", " ").split()}
    assert {"math", "code", "swe", "react"} <= words
    assert not {"noop", "chat"} & words


def test_all_mistakes_are_listed_with_file_and_line(store_url: str, tmp_path: Path) -> None:
    lines = [
        {"data_source": "noop", "fields": {}},
        {"data_source": "math", "fields": {"family": "gcd"}},
        {"data_source": "noop", "fields": {"seconds": -1, "stuck": "fast"}},
    ]
    file = tmp_path / "problems.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    output = output_of(main, "submit", str(file), "--url", store_url, code=1)
    for place in ("3.fields.question", "3.fields.answer", "3.fields.metadata", "5.fields.seconds", "5.fields.stuck"):
        assert f"{file}:{place}: " in output
    file.write_text(file.read_text().replace("math", "maths"))
    assert f"{file}:3.data_source: no handler for 'maths'" in output_of(
        main, "submit", str(file), "--url", store_url, code=1
    )
    file.write_text('{"data_source": "noop"}\n{"fields": {}}')
    output = output_of(main, "submit", str(file), "-n", "0", "--set", "sampling.topp=1", "--url", store_url, code=1)
    for place in (f"{file}:1.fields: ", f"{file}:2.data_source: ", "n_samples: ", "sampling.topp: "):
        assert place in output


def test_whole_request_can_be_read_from_a_file(store_url: str, tmp_path: Path) -> None:
    (tmp_path / "request.yaml").write_text(
        "n_samples: 2\nsampling: {top_p: 0.5, temperature: 0.1}\nmetadata: {run: 7}\n"
    )
    (tmp_path / "problems.jsonl").write_text('{"data_source": "noop", "fields": {}}')
    words = ("--request", str(tmp_path / "request.yaml"), "--temperature", "0.7", "--set", "limits.run_s=3")
    batch_id = output_of(main, "submit", str(tmp_path / "problems.jsonl"), *words, "--url", store_url).splitlines()[0]
    store = Store(store_url)
    try:
        stored = store.read(lambda connection: request_of(connection, batch_id))
    finally:
        store.close()
    assert (stored["n_samples"], stored["metadata"], stored["limits"]["run_s"]) == (2, {"run": 7}, 3.0)
    assert (stored["sampling"]["top_p"], stored["sampling"]["temperature"]) == (0.5, 0.7)
    (tmp_path / "request.yaml").write_text("instances: [{data_source: noop, fields: {}}]")
    assert output_of(main, "submit", "--request", str(tmp_path / "request.yaml"), "--url", store_url).startswith("b")
    both = output_of(main, "submit", str(tmp_path / "problems.jsonl"), *words[:2], "--url", store_url, code=1)
    assert "also has instances: give only one of the two" in both


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("watch", "b0", "there is no batch b0\n"),
        ("show", "b0.1.2", "there is no rollout b0.1.2\n"),
        ("show", "b0", "there is no rollout b0: the id has the form of a batch's; a rollout's is BATCH.GROUP.SAMPLE"),
        ("watch", "b0.1", "there is no batch b0.1: the id has the form of a group's"),
        ("show", "no such", "there is no batch, group or rollout 'no such'"),
        ("cancel", "b0.1", "there is no group b0.1"),
    ],
)
def test_unknown_id_is_reported_as_not_found(store_url: str, command: str, given: str, expected: str) -> None:
    assert f"Error: NotFound: {expected}" in output_of(main, command, given, "--url", store_url, code=1)


STARVED: dict[str, dict[str, str]] = {
    "a dumb terminal": {"TERM": "dumb"},
    "no terminal type": {"TERM": ""},
    "the C locale": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "a home that cannot be written": {"HOME": "/proc/nowhere", "FARM_HOME": ""},
    "no home": {"HOME": "", "FARM_HOME": ""},
}


@pytest.mark.parametrize("more", STARVED.values(), ids=STARVED)
def test_minimal_environment_still_gives_a_clear_error(tmp_path: Path, more: dict[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    env |= {"FARM_HOME": str(tmp_path / "home")} | more
    env = {name: value for name, value in env.items() if value or name != "FARM_HOME"}
    listed = subprocess.run([FARM, "ls", "--url", str(tmp_path)], env=env, capture_output=True, timeout=600)
    assert (listed.returncode, listed.stderr.count(b"\n")) == (1, 1)
    assert listed.stdout == b""
    assert listed.stderr.startswith(b"Error: FarmUnreachable: no farm was ever started in")


def test_farm_home_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (
        ("/proc/farm", "No such file"),
        (str(tmp_path / "file"), "File exists"),
        (f"{tmp_path}/file/a", "Not a"),
    ):
        output = output_of(main, "up", code=1, env={"FARM_HOME": place})
        assert f"FARM_HOME: {place} cannot be created ({why}" in output
        assert output.count("\n") == 1


@pytest.mark.parametrize(("words", "expected"), [((), 2.0), (("--wait", "0.5"), 0.5)], ids=["default", "option"])
def test_command_waits_briefly_for_a_farm_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: float
) -> None:
    waited = []

    def connect(url: object, *, first_s: float) -> farm.Farm:
        waited.append(first_s)
        raise farm.FarmUnreachable("there is no answer")

    monkeypatch.setattr("farm.client.connect.connect", connect)
    assert "there is no answer" in output_of(main, "ls", "--url", "http://127.0.0.1:9/", *words, code=1)
    assert waited[0] == pytest.approx(expected, abs=0.1)
    assert (len(waited) > 1) == bool(words), "it retries only with a given timeout"


def test_command_with_wait_retries_while_the_farm_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = [farm.FarmUnreachable("there is no farm"), farm.StoreUnavailable("it has no tables yet")]

    def connect(url: object, *, first_s: float) -> Any:
        if errors:
            raise errors.pop(0)
        return MagicMock()

    monkeypatch.setattr("farm.client.connect.connect", connect)
    output_of(main, "engines", "clear", "--url", str(tmp_path), "--wait", "60")
    assert not errors


def test_interrupt_ends_a_command_with_130(tmp_path: Path) -> None:
    """Here during the wait for a farm that does not exist yet."""
    process = subprocess.Popen(
        [FARM, "ls", "--wait", "60", "--url", "http://127.0.0.1:9/"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until_it_waits(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors.strip()) == (130, b"interrupted")


def test_interrupt_swallowed_by_a_library_ends_a_command_with_130(capfd: pytest.CaptureFixture[str]) -> None:
    """As pydantic does where Rust calls Python: it prints the interrupt as ignored, then fails in another way."""

    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class One(Commands):
        def get_command(self, context: click.Context, name: str) -> click.Command:
            return click.Command(name, callback=fails)

    def fails() -> None:
        Swallows()
        raise click.ClickException("String should match pattern")

    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(SystemExit) as ended:
        One("farm").main(["ls"], prog_name="farm")
    assert (ended.value.code, capfd.readouterr()) == (130, ("", "interrupted\n"))
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def until_it_waits(pid: int) -> None:
    """Wait until a process has loaded the HTTP client, which is its last import."""
    deadline = time.monotonic() + 60
    while "_ssl" not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
