"""A benchmark's rows: a table for people, and JSON for machines."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    """`add` a row for each figure; `against` are figures of the same run to hold it against."""

    title: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: str, value: float, unit: str, **against: float) -> None:
        self.rows[row] = {"value": value, "unit": unit, "against": against}
        Console(stderr=True).print(f"{row}: {value:.4g} {unit}", highlight=False)

    def show(self, json_file: Path | None) -> None:
        table = Table(title=self.title, title_justify="left")
        for column in ("figure", "value", "unit", "against, in the same run"):
            table.add_column(column, justify="right" if column == "value" else "left")
        for row, figure in self.rows.items():
            against = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figure["against"].items())
            table.add_row(row.replace("_", " "), f"{figure['value']:.4g}", figure["unit"], against)
        Console(width=140).print(table)
        if json_file is not None:
            json_file.write_text(json.dumps(self.rows, indent=2) + "\n")


def options(description: str | None) -> argparse.Namespace:
    """`--quick` (within 50 s) and `--json FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args()
