"""Commands that describe instances show every kind: its fields, and a line that its handler accepts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farm.cli.handlers import handlers
from farm.plugins import installed, load

ROOT = Path(__file__).parents[4]
KINDS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["farm.handlers"]


@pytest.mark.parametrize("name", KINDS)
def test_schema_and_example_of_every_handler_are_printed(name: str) -> None:
    shown = CliRunner().invoke(handlers, ["show", name])
    assert shown.exit_code == 0, shown.output
    schema, _, example = shown.stdout.rpartition("\n{")
    instance = json.loads("{" + example)
    assert instance["data_source"] == name
    handler = load("farm.handlers", name)
    assert set(json.loads(schema)["properties"]) == set(handler.instance_type.model_json_schema()["properties"])
    handler.instance_type.model_validate(instance["fields"])


def test_all_kinds_are_listed() -> None:
    listed = CliRunner().invoke(handlers, [])
    assert listed.exit_code == 0, listed.output
    assert [name for name in {*KINDS, *installed("farm.handlers")} if name not in listed.output] == []


def test_unknown_kind_is_refused_with_a_list_of_known_ones() -> None:
    shown = CliRunner().invoke(handlers, ["show", "parchment"])
    assert shown.exit_code != 0
    assert "there is no handler 'parchment'; installed here: " in shown.output
