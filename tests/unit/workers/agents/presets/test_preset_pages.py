"""Each shipped agent has a page whose command is valid, and whose costs equal those in the table."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from farm.cli.submit import submit
from farm.plugins import installed
from workers.plugins.registry import agent

DOCS = Path(__file__).parents[5] / "docs" / "how-to" / "plugins" / "agents"
OWN = {"react", "environment"}
"""Agents that are not programs in a sandbox."""
PRESETS = sorted(
    name
    for name, point in installed("farm.agents").items()
    if point.value.startswith("workers.agents.") and name not in OWN
)
ROWS = {
    cells[0].strip("`"): cells
    for line in (DOCS / "presets.md").read_text().splitlines()
    if line.startswith("| `")
    for cells in [line.strip("| ").split(" | ")]
}


def test_all_presets_are_in_the_table_and_have_a_page() -> None:
    assert {path.stem for path in (DOCS / "presets").glob("*.md")} == {*PRESETS} == {*ROWS}


@pytest.mark.parametrize("name", PRESETS)
def test_command_of_the_page_is_valid(name: str) -> None:
    [block] = re.findall(r"```bash\n(.*?)```", (DOCS / "presets" / f"{name}.md").read_text(), re.DOTALL)
    [line] = block.splitlines()
    program, verb, *words = shlex.split(line)
    given = submit.make_context(verb, words, resilient_parsing=False).params
    assert (program, verb, given["agent"]) == ("farm", "submit", name)
    assert given["file"].resolve().exists()
    assert agent(name)


@pytest.mark.parametrize("name", PRESETS)
def test_costs_of_the_page_equal_the_tested_ones(name: str) -> None:
    page = (DOCS / "presets" / f"{name}.md").read_text()
    *_, n_calls, n_rows, _ = ROWS[name]
    [counts] = re.findall(r"(\d+) calls, (\d+) training rows?\.", page)
    assert counts == (n_calls, n_rows)
