"""docs/settings.md has every setting, with its default and what the code says of it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from pydantic_core import PydanticUndefined

from farm.settings import SET_BY_FARM, Settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
_FOUND = {"home": "`~/.farm`", "scratch": "`/tmp/farm-UID`", "node": "the machine's name"}
"""Defaults that depend on where it runs."""


def _meanings() -> dict[str, str]:
    """Return the docstring of each field of Settings, as a line."""
    tree = ast.parse((ROOT / "farm" / "settings.py").read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    result, name = {}, ""
    for node in body:
        if isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            result[name] = re.sub(r"\s+", " ", str(node.value.value)).strip()
    return result


def _default(name: str) -> str:
    field = Settings.model_fields[name]
    value = field.default if field.default is not PydanticUndefined else {}
    return _FOUND.get(name) or ("" if value in ("", None, {}) else f"`{json.dumps(value)}`".replace('"', ""))


def rows() -> list[str]:
    meanings = _meanings()
    return [
        f"| `{name}` | {_default(name)} | {meanings[name].replace('|', '&#124;')} |"
        for name in Settings.model_fields
        if name not in SET_BY_FARM
    ]


def test_every_setting_is_on_the_page() -> None:
    written = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert written == rows(), "the rows should be:\n" + "\n".join(rows())
