"""Health checks of compose files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farm.errors import InvalidRequest
from farm.tasks.compose import parse_healthcheck, read_compose
from farm.tasks.harbor_config import HealthcheckTable


def read(folder: Path, healthcheck: Any) -> Any:
    path = folder / "docker-compose.yaml"
    path.write_text(json.dumps({"services": {"main": {"healthcheck": healthcheck}}}))
    return parse_healthcheck(read_compose(path, "main").healthcheck)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, None),
        ({"interval": "5s"}, None),
        ({"disable": True, "test": "true"}, "none"),
        ({"test": ["NONE"]}, "none"),
        ({"test": "curl $$URL"}, ("curl $URL", 30.0, 30.0, 30.0, 3)),
        ({"test": ["CMD-SHELL", "a && b"], "retries": 10}, ("a && b", 30.0, 30.0, 30.0, 10)),
        ({"test": ["CMD", "test", "-e", "a b"], "interval": "1m30s"}, ("test -e 'a b'", 90.0, 30.0, 90.0, 3)),
        ({"test": "x", "timeout": "500ms", "start_period": "1h", "interval": "2.5s"}, ("x", 2.5, 0.5, 3602.5, 3)),
    ],
)
def test_health_check_is_read_with_the_defaults_of_docker(tmp_path: Path, written: Any, expected: Any) -> None:
    found = read(tmp_path, written)
    if isinstance(found, HealthcheckTable):
        found = found.command, found.interval_sec, found.timeout_sec, found.start_period_sec, found.retries
    assert found == expected


@pytest.mark.parametrize(
    "written",
    [
        *("true", 5, ["CMD", "x"], {"test": ["sh", "x"]}, {"test": ["CMD"]}, {"test": "x", "interval": "soon"}),
        *({"test": "x", "timeout": ""}, {"test": "x", "retries": 0}, {"test": "x", "retries": "many"}),
    ],
)
def test_invalid_health_check_is_refused_by_its_field(tmp_path: Path, written: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(tmp_path, written)
    assert str(raised.value.field).endswith("docker-compose.yaml: services.main.healthcheck")
