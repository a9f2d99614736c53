"""Files of rewards as tests may leave them, step gates and totals: always the same."""

from __future__ import annotations

import itertools
import random
from typing import Any

_NUMBERS = (
    *(
        "1",
        "0",
        "-1",
        "0.25",
        " 0.5\n",
        "\t1\r\n",
        "1.",
        ".5",
        "1e-3",
        "+1",
        "1_0",
        "0x1",
        "1,0",
        "1 0",
        "1;",
        "true",
        "True",
    ),
    *(
        "nan",
        "NaN",
        "-inf",
        "Infinity",
        "1e999",
        "-1e999",
        "1e308",
        "9" * 400,
        "one",
        "",
        " ",
        "\n",
        "\x00",
        "1\x00",
        "\u00b2",
    ),
    *("\xff\xfe", "\xef\xbb\xbf1", "1\x0b", "\x1c1", "null", "[]", "{}", '"1"', "'1'"),
)
_VALUES = (
    *(
        "1",
        "0",
        "0.5",
        "-1",
        "true",
        "false",
        "null",
        '"1"',
        '"NaN"',
        "[1]",
        "{}",
        '{"a": 1}',
        "NaN",
        "Infinity",
        "-Infinity",
    ),
    *("1e999", "1e308", "1" + "0" * 30, "1" + "0" * 400, "1.0e0", "-0.0"),
)
_TEXTS = (
    *(
        "",
        " ",
        "{",
        "{}",
        "[]",
        "[1]",
        "null",
        "1",
        "0.5",
        "true",
        '"1"',
        '{"reward": 1} x',
        "{'reward': 1}",
        '{"reward": 1,}',
    ),
    *(
        '{"a": 1, "a": 0}',
        '{"": 1}',
        '{"1": 1}',
        '\xef\xbb\xbf{"reward": 1}',
        '{"reward": 1}\n\n',
        "[" * 60_000,
        "\xff",
    ),
    *('{"reward": 0.5, "b": 1}', '{"b": 1, "c": 0}', '{"reward": 1, "b": null}', '// c\n{"reward": 1}', "\x00"),
    '{"\\u00e9": 1}',
    "{" + ", ".join(f'"r{n}": {n % 2}' for n in range(100)) + "}",
    "".join(f"{letter}\x00" for letter in '{"reward": 1}'),
)


def reward_cases() -> dict[str, dict[str, str]]:
    """Return the files of each case, with each character for a byte."""
    cases: dict[str, dict[str, str]] = {"no file": {}}
    texts = {"reward.txt": _NUMBERS, "reward.json": (*_TEXTS, *(f'{{"reward": {each}}}' for each in _VALUES))}
    for name, each in texts.items():
        cases |= {f"{name} {text[:60]!r} of {len(text)}": {name: text} for text in each}
    for text, number in itertools.product(('{"reward": 0.5}', "", "{}", "x", "0.5"), ("1", "", "x")):
        cases[f"both: {text!r}, {number!r}"] = {"reward.json": text, "reward.txt": number}
    return {name: {file: _bytes(text) for file, text in files.items()} for name, files in cases.items()}


def _bytes(text: str) -> str:
    return text if text.isascii() or max(text) <= "\xff" else text.encode().decode("latin-1")


def gate_cases() -> dict[str, dict[str, Any]]:
    """Return rewards of a step, and its requirements."""
    rewards: tuple[dict[str, float], ...] = (
        {},
        {"reward": 0},
        {"reward": 1},
        {"reward": 0.5, "a": 1},
        {"a": -1, "b": 2},
    )
    wanted: tuple[Any, ...] = (
        0,
        1,
        0.5,
        -1,
        {"reward": 0.5},
        {"a": 1},
        {"a": 1, "b": 2},
        {"a": -1, "b": 2.5},
        {},
        {"c": -1},
    )
    pairs = itertools.product(rewards, wanted)
    return {f"{given} of {least}": {"rewards": given, "min_reward": least} for given, least in pairs}


def total_cases() -> dict[str, dict[str, Any]]:
    """Return rewards of steps that were all verified, and the rule for their total."""
    dice = random.Random(20261127)
    cases: dict[str, dict[str, Any]] = {}
    for number in range(200):
        names = ("reward", "a", "b")[: dice.randint(1, 3)]
        steps = [
            {name: dice.choice((0, 1, 0.5, -1, 0.1, 3)) for name in names if dice.random() < 0.8}
            for _ in range(dice.randint(1, 4))
        ]
        strategy = dice.choice((None, "mean", "final"))
        cases[f"{number}: {strategy} of {steps}"] = {"strategy": strategy, "verified": steps}
    return cases
