"""Configurations of images as Docker, BuildKit and others write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.sandboxes.images.building.oci_layouts import parse_config, read_config, write_config
from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig

DOCKER = {
    "architecture": "amd64",
    "config": {
        "Hostname": "",
        "User": "node:1000",
        "ExposedPorts": {"8080/tcp": {}},
        "Env": ["PATH=/usr/local/bin"],
        "Cmd": ["node"],
        "Healthcheck": {
            "Test": ["CMD-SHELL", "curl -f localhost || exit 1"],
            "Interval": 5_000_000_000,
            "Timeout": 1_500_000_000,
            "StartPeriod": 2_000_000_000,
            "Retries": 7,
        },
        "Volumes": {"/data": {}},
        "WorkingDir": "/home/node/app/",
        "Entrypoint": ["docker-entrypoint.sh"],
        "OnBuild": ["COPY . ."],
        "Labels": {"version": "1"},
        "StopSignal": "SIGINT",
        "Shell": ["/bin/bash", "-c"],
    },
    "rootfs": {"type": "layers", "diff_ids": []},
}


def config(**fields: Any) -> ImageConfig:
    return parse_config(json.dumps({"config": fields}))


def test_settings_for_programs_are_read(tmp_path: Path) -> None:
    found = parse_config(json.dumps(DOCKER))
    assert found == ImageConfig(
        workdir="/home/node/app",
        user="node:1000",
        shell=("/bin/bash", "-c"),
        entrypoint=["docker-entrypoint.sh"],
        command=["node"],
        healthcheck=Healthcheck("curl -f localhost || exit 1", 5.0, 1.5, 2.0, 5.0, 7),
        exposed=("8080/tcp",),
        volumes=("/data",),
        labels={"version": "1"},
        stop_signal="SIGINT",
        onbuild=("COPY . .",),
    )
    write_config(found, tmp_path)
    assert read_config(tmp_path) == found


@pytest.mark.parametrize(
    "text", ["{}", '{"config": null}', '{"config": {"Entrypoint": null, "User": null, "Labels": null}}']
)
def test_missing_settings_are_empty(tmp_path: Path, text: str) -> None:
    assert parse_config(text) == ImageConfig() == read_config(tmp_path)


@pytest.mark.parametrize(
    ("test", "command"),
    [
        (["CMD", "test", "-e", "/x"], ["test", "-e", "/x"]),
        (["CMD-SHELL", "a | b"], "a | b"),
        (["NONE"], None),
        ([], None),
    ],
)
def test_health_check_has_docker_defaults(test: list[str], command: str | list[str] | None) -> None:
    expected = None if command is None else Healthcheck(command, 30.0, 30.0, 0.0, 5.0, 3)
    assert config(Healthcheck={"Test": test}).healthcheck == expected


def test_working_directory_is_absolute() -> None:
    assert config(WorkingDir="app/../src").workdir == "/src"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"config": {"Entrypoint": "a text"}}', '{"config": {"User": 5}}', '{"config": 3}']
)
def test_invalid_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        parse_config(text)
