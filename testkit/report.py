"""A benchmark's results: a table for people, and JSON for programs."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    """Collects rows by `add`, one per figure; `against` are figures of the same run for comparison."""

    title: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self,
        row: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        **against: float,
    ) -> None:
        """Add a row; `at_most` or `at_least` is the target of the figure."""
        self.rows[row] = {"value": value, "unit": unit, "against": against}
        if at_most is not None or at_least is not None:
            good = value <= at_most if at_most is not None else value >= (at_least or 0)
            self.rows[row]["aim"] = {"at_most": at_most} if at_most is not None else {"at_least": at_least}
            self.rows[row]["reached"] = good
        Console(stderr=True).print(f"{row}: {value:.4g} {unit}", highlight=False)

    def times(self, row: str, seconds: Sequence[float], *, at_most: float | None = None, **against: float) -> float:
        """Add the median of some times, in ms, with the 95th and 99th percentiles. Returns the median."""
        ordered = sorted(value * 1000 for value in seconds)
        median = statistics.median(ordered)
        self.add(row, median, "ms", at_most=at_most, **against)
        self.rows[row] |= {"p95": ordered[int(len(ordered) * 0.95)], "p99": ordered[int(len(ordered) * 0.99)]}
        self.rows[row]["n"] = len(ordered)
        return median

    def show(self, json_file: Path | None) -> None:
        table = Table(title=self.title, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right", no_wrap=True)
        columns: dict[str, Any] = {"unit": lambda figure: figure["unit"]}
        if any("p95" in figure for figure in self.rows.values()):
            columns["p95 / p99"] = lambda figure: (
                f"{figure['p95']:.3g} / {figure['p99']:.3g}" if "p95" in figure else ""
            )
        if any("aim" in figure for figure in self.rows.values()):
            columns["aim"] = _aim
        columns["against, in the same run"] = _against
        for column in columns:
            table.add_column(column)
        for row, figure in self.rows.items():
            cells = [tell(figure) for tell in columns.values()]
            table.add_row(row.replace("_", " "), f"{figure['value']:.4g}", *cells)
        Console(width=140).print(table)
        if json_file is not None:
            json_file.write_text(json.dumps(self.rows, indent=2) + "\n")


def _aim(figure: dict[str, Any]) -> str:
    if "aim" not in figure:
        return ""
    [(name, value)] = figure["aim"].items()
    return f"{'≤' if name == 'at_most' else '≥'} {value:g}{'' if figure['reached'] else ', missed'}"


def _against(figure: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figure["against"].items())


def options(description: str | None) -> argparse.Namespace:
    """Parse `--quick` (within 50 s) and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args()
