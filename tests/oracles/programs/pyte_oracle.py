"""Results of pyte, run in its own environment: `pyte_oracle.py QUESTION < CASES`.

`screens`: for a text, the lines that have scrolled away, and then those of the screen, without blanks at their ends. A
line feed begins a new line, as on the terminals of programs that do not handle theirs.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import Any

import pyte

COLUMNS, ROWS = 200, 50


def screens(case: str) -> Any:
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=100_000, ratio=0.5)
    pyte.Stream(screen).feed(case.replace("\n", "\r\n"))
    rows = [*screen.history.top, *(screen.buffer[y] for y in range(ROWS))]
    lines = ["".join(row[x].data for x in range(COLUMNS)).rstrip() for row in rows]
    return unicodedata.normalize("NFC", "\n".join(lines).rstrip("\n"))


QUESTIONS = {"screens": screens}


def main() -> None:
    answer = QUESTIONS[sys.argv[1]]
    answers = {}
    for name, case in json.load(sys.stdin)["cases"].items():
        try:
            answers[name] = {"value": answer(case)}
        except TypeError as error:
            answers[name] = {"refused": str(error)}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
