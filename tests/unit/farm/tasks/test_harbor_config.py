from __future__ import annotations

import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from farm.tasks.harbor_config import TaskConfig


def _config(text: str) -> TaskConfig:
    return TaskConfig.model_validate(tomllib.loads(text))


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ('version = "1.0"', "schema_version", "1.0"),
        ("", "schema_version", "1.4"),
        ('[environment]\nmemory = "2G"', "environment.memory_mb", 2048),
        ('[environment]\nmemory = "512M"\nstorage = "1.5g"', "environment.storage_mb", 1536),
        ('[environment]\nmemory = "2G"\nmemory_mb = 2048', "environment.memory_mb", 2048),
        ("[environment]\nallow_internet = false", "environment.network_mode", "no-network"),
        ("[environment]\nallow_internet = true", "environment.network_mode", "public"),
        ("[environment]\nallow_internet = 'false'", "environment.network_mode", "no-network"),
        ('[environment]\nallow_internet = true\nnetwork_mode = "no-network"', "environment.network_mode", "no-network"),
        ("[environment]\ncpus = 0.5", "environment.cpus", 0.5),
        ('[environment]\nos = "Windows"', "environment.os", "windows"),
        ('artifacts = ["/app/x"]', "artifacts.0.source", "/app/x"),
        ('artifacts = [{ source = "/app", exclude = ["*.o"] }]', "artifacts.0.exclude", ("*.o",)),
        ('[verifier.environment]\ndocker_image = "x"', "verifier.mode", "separate"),
        ('[verifier]\nenvironment_mode = "shared"', "verifier.mode", "shared"),
        ("[verifier]\nenv = { A = 'b' }", "verifier.env", {"A": "b"}),
        ("[agent]\nuser = 1000", "agent.user", 1000),
        ("[nowhere]\nx = 1", "steps", ()),
    ],
)
def test_tables_are_read_as_harbor_reads_them(text: str, path: str, value: Any) -> None:
    at: Any = _config(text)
    for name in path.split("."):
        at = at[int(name)] if name.isdecimal() else getattr(at, name)
    assert at == value


@pytest.mark.parametrize(
    "text",
    [
        '[environment]\nmemory = "2G"\nmemory_mb = 1',
        '[environment]\nmemory = "lots"',
        "[environment]\ncpus = nan",
        '[environment]\nallowed_hosts = ["x"]',
        '[environment]\nos = "plan9"',
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
        "[verifier]\ntimeout_sec = inf",
        '[task]\nname = "no-organisation"',
        '[task]\nname = "a/../b"',
        'artifacts = ["/app/../etc"]',
        '[[steps]]\nname = "../up"',
        '[[steps]]\nname = "a"\n[[steps]]\nname = "A"',
        'multi_step_reward_strategy = "best"',
        '[environment]\nmemory = "infG"',
        "[environment]\nallow_internet = 'maybe'",
        "[agent]\nallowed_hosts = []",
        '[task]\nname = "_a/b"',
        '[[steps]]\nname = "con.txt"',
        '[[steps]]\nname = "é"\n[[steps]]\nname = "e\u0301"',
        'artifacts = [{ source = "x", destination = "/x" }]',
        'artifacts = [{ source = "x", service = "db" }]',
    ],
)
def test_values_that_harbor_refuses_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        _config(text)


def test_modes_and_environments_of_steps_override_those_of_the_task() -> None:
    config = _config(
        '[verifier]\nenvironment_mode = "separate"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
        '[steps.verifier]\nenvironment_mode = "shared"'
    )
    assert [config.mode(step) for step in config.steps] == ["separate", "shared"]
    assert config.verifier_environment(config.steps[0]) is config.environment
