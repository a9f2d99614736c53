"""Every setting can be given in farm.toml and by a variable; `farm config` shows each value and its source."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from farm.cli.batches import ls
from farm.cli.keys import keys
from farm.cli.upkeep.config import config
from farm.settings import SET_BY_FARM, Settings, settings
from tests.services.commands import output_of
from workers.node.command import main as node

NAMES = [name for name in Settings.model_fields if name not in SET_BY_FARM]
CLEAR = {f"FARM_{name.upper()}": None for name in Settings.model_fields}
OWN = {
    "sandbox_ids": "100000:65536",
    "node_address": "n1",
    "webhook_url": "https://hooks.example/farm",
    "otel_endpoint": "http://collector.example:4318",
}
"""Values of settings that do not accept any word."""
HIDDEN = {"api_key", "secret_key", "policy_key", "search_key", "webhook_secret", "webhook_url"}


def _value(name: str, n: int) -> Any:
    """Return a value of a setting that is not its default; another for each n."""
    field = Settings.model_fields[name]
    kinds = {field.annotation, *get_args(field.annotation)}
    if name in OWN:
        return OWN[name]
    if bool in kinds:
        return True
    if kinds & {int, float}:
        return 20 + n
    if any("dict" in str(kind) for kind in kinds):
        return {"key": f"/value{n}"}
    words = [kind for kind in kinds if isinstance(kind, str)]
    return max(word for word in words if word != field.default) if words else f"/word{n}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {json.dumps(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def _lines(path: Path, **env: str) -> dict[str, tuple[str, str]]:
    """Return (value, source) of each setting that `farm config` shows."""
    shown = output_of(config, env={**CLEAR, "FARM_CONFIG": str(path), **env})
    found = re.findall(r"^(\w+) += (.*?)  # (.*)$", shown, re.MULTILINE)
    return {name: (value, source) for name, value, source in found}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with all settings, one a line."""
    path = tmp_path_factory.mktemp("config") / "farm.toml"
    path.write_text("".join(f"{name} = {_toml(_value(name, 1))}\n" for name in NAMES))
    return path


@pytest.fixture(scope="module")
def by_file(path: Path) -> dict[str, tuple[str, str]]:
    return _lines(path)


@pytest.fixture(scope="module")
def by_variable(path: Path) -> dict[str, tuple[str, str]]:
    given = {name: _value(name, 2) for name in NAMES}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return _lines(path, **{f"FARM_{name.upper()}": text for name, text in texts.items()})


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    empty = tmp_path_factory.mktemp("config") / "farm.toml"
    empty.write_text("")
    return _lines(empty)


@pytest.mark.parametrize("name", NAMES)
def test_variable_overrides_the_file_for_each_setting(
    name: str,
    path: Path,
    by_file: dict[str, tuple[str, str]],
    by_variable: dict[str, tuple[str, str]],
    by_default: dict[str, tuple[str, str]],
) -> None:
    assert by_default[name][1] == "default"
    assert by_file[name][1] == f"{path}:{NAMES.index(name) + 1}"
    assert by_variable[name][1] == f"FARM_{name.upper()}"
    assert by_file[name][0] != by_default[name][0]
    for n, (value, _) in enumerate((by_file[name], by_variable[name]), start=1):
        if name in HIDDEN:
            assert value == '"***"'
        elif name == "build_env":
            assert value == '{"key" = "***"}'
        else:
            inner = _value(name, n)
            text = str(inner["key"] if isinstance(inner, dict) else inner)
            assert text.lower() in value.lower()


def test_internal_setting_cannot_be_set_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    for name in SET_BY_FARM:
        path.write_text(f"\n{name} = 1\n")
        shown = output_of(config, "--check", env={**CLEAR, "FARM_CONFIG": str(path)}, code=1)
        assert shown == f"{path}:2: {name} is set by the farm itself: leave it out\n"


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shared" / "farm.toml"
    path.parent.mkdir()
    monkeypatch.setenv("HOME", "/me")
    path.write_text(
        'home = "h"\nscratch = "~/s"\ncgroup = "/abs"\nlog_dir = "logs"\napi_ca = "ca.pem"\nstore_url = "sqlite:///f.db"\n'
        'build_files = { "/etc/a" = "a" }\nswe_images = { a = "./a.sif", b = "docker://b/c" }\n'
    )
    for name in CLEAR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FARM_CONFIG", str(path))
    known = Settings()
    folder = path.parent
    assert (known.home, known.scratch, known.cgroup) == (folder / "h", Path("/me/s"), Path("/abs"))
    assert (known.log_dir, known.api_ca, known.build_files) == (
        folder / "logs",
        str(folder / "ca.pem"),
        {"/etc/a": str(folder / "a")},
    )
    assert known.store_url == known.database_url == f"sqlite:///{folder}/f.db"
    assert known.swe_images == {"a": str(folder / "a.sif"), "b": "docker://b/c"}
    for url in ("sqlite:////abs/f.db", "sqlite:///:memory:", "postgresql://u@h/db"):
        path.write_text(f'store_url = "{url}"')
        assert Settings().store_url == url
    assert Settings(store_url="sqlite:///mine.db").store_url == "sqlite:///mine.db", (
        "arguments of the caller override the file"
    )


def test_impossible_path_and_unprintable_key_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    for text, fault in (
        ('home = "~no-such-user/x"', "home: there is no such home: ~no-such-user/x"),
        ('log_dir = "a\\u0000b"', "log_dir: a path cannot contain NUL"),
        ('build_files = { "/etc/a" = "~no-such-user/a" }', "build_files: there is no such home: ~no-such-user/a"),
        ('"" = 1', "'' is not a setting; `farm config` lists all"),
    ):
        path.write_text(text)
        assert (
            output_of(config, env={**CLEAR, "FARM_CONFIG": str(path)}, code=1)
            == f"Error: InvalidRequest: {path}:1: {fault}\n"
        )
    path.write_text('"a\\nb\\u202e" = 1')
    assert output_of(config, "--check", env={**CLEAR, "FARM_CONFIG": str(path)}, code=1) == (
        f"{path}: 'a\\nb\\u202e' is not a setting; `farm config` lists all\n"
    )


def test_shown_value_is_valid_toml(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    for value in ("a\\b'c", "a\\", '"', "'" * 3, "\x7f\t", "ü\u202e"):
        path.write_text(f"node = {json.dumps(value)}")
        shown, _ = _lines(path)["node"]
        assert tomllib.loads(f"node = {shown}") == {"node": value}


def test_variable_replaces_a_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "farm.toml"
    path.write_text('[build_env]\na = "1"\n')
    monkeypatch.setenv("FARM_CONFIG", str(path))
    assert Settings().build_env == {"a": "1"}
    monkeypatch.setenv("FARM_BUILD_ENV", '{"b": "2"}')
    assert Settings().build_env == {"b": "2"}


BAD = """\
leas_s = 5
warm_pool = "many"
audit_s = true
retry_s = nan
tick_s = -1
node = 5
swe_images = { a = 1 }
[sandboxes]
x = 1
"""


def test_all_mistakes_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(BAD)
    env = {**CLEAR, "FARM_CONFIG": str(path)}
    shown = output_of(config, "--check", env={**env, "FARM_LEASES": "5"}, code=1)
    named = {int(line): text for line, text in re.findall(rf"^{path}:(\d+): (.*)$", shown, re.MULTILINE)}
    keys_at = {1: "leas_s", 2: "warm_pool", 3: "audit_s", 4: "retry_s", 5: "tick_s", 6: "node", 7: "swe_images.a"}
    assert {n: text.split(":")[0].split()[0] for n, text in named.items()} == {**keys_at, 8: "sandboxes"}
    assert "did you mean lease_s?" in named[1]
    assert "FARM_LEASES: is not a setting; did you mean lease_s?" in shown
    # and every command refuses to run with them
    for command in (ls, keys):
        refused = output_of(command, *(["list"] if command is keys else []), env=env, code=1)
        assert "leas_s is not a setting" in refused
        assert "Traceback" not in refused


def test_wrong_variable_is_named_even_if_the_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text("warm_pool = 3\n")
    env = {**CLEAR, "FARM_CONFIG": str(path)}
    assert "FARM_WARM_POOL: Input should be a valid integer" in output_of(
        config, env={**env, "FARM_WARM_POOL": "x"}, code=1
    )
    assert "FARM_BUILD_ENV: must be JSON" in output_of(config, env={**env, "FARM_BUILD_ENV": "x"}, code=1)
    assert output_of(config, "--check", env=env) == f"ok: {path}\n"


def test_secrets_are_hidden_and_readable_files_reported(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text('store_url = "postgresql://me:geheim@db/farm"\napi_key = "geheim"\n[build_env]\nT = "geheim"\n')
    path.chmod(0o644)
    env = {**CLEAR, "FARM_CONFIG": str(path)}
    shown = output_of(config, env=env)
    assert "geheim" not in shown
    assert "postgresql://me:***@db/farm" in shown
    assert f"store_url can be read by all users of this machine: chmod o-r {path}" in output_of(
        config, "--check", env=env, code=1
    )
    path.chmod(0o600)
    assert output_of(config, "--check", env=env) == f"ok: {path}\n"
    unencoded = ("postgresql://me:ge/heim@db/farm", "postgresql://me:ge@heim@db/f")
    for url in ("postgresql://db/f?password=geheim", *unencoded):
        path.write_text(f'store_url = "{url}"')
        assert "heim" not in output_of(config, env=env, code=int(url in unencoded))
    path.write_text('swe_images = { a = "docker://registry:5000/a@sha256:1" }')
    assert '{"a" = "docker://registry:5000/a@sha256:1"}' in output_of(config, env=env)


def test_processes_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "farm.toml"
    path.write_text("max_open = 7\n")
    monkeypatch.setenv("FARM_CONFIG", str(path))
    settings.cache_clear()
    try:
        assert settings().max_open == 7
    finally:
        settings.cache_clear()


def test_node_does_not_start_with_an_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text("run_slot = 7\n")
    env = {**CLEAR, "FARM_CONFIG": str(path)}
    assert f"{path}:1: run_slot is not a setting; did you mean run_slots?" in output_of(node, env=env, code=1)
    path.write_text("run_slots = 7\n")
    assert "FARM_BROKER_URL is not set" in output_of(node, env=env, code=1)
