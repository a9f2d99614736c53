"""Turns of agents, some of which repeat themselves: always the same.

A turn is `calls`, each with its `result`, and a `thought` next to them, or it is a text that is `said`, to which the
reply is `heard`. A call has a `name` and `arguments`, or it is a `command`, which ends with a `code`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Turn = dict[str, Any]

N = 150
"""Number of generated lists of turns of each kind."""
_MOST_TURNS = 16


def _called(draw: random.Random) -> Turn:
    arguments = draw.choice(({"path": "/a", "n": 1}, {"n": 1, "path": "/a"}, {"path": "/a", "n": 2}, {}))
    return {"name": draw.choice(("look", "look", "read")), "arguments": arguments, "result": draw.choice("xxy")}


def _command(draw: random.Random) -> Turn:
    command, code = draw.choice(("ls", "ls", "pytest -q")), draw.choice((0, 0, 0, 1))
    # the output of a command says how it ended
    return {"command": command, "result": f"{command} ended with {code}", "code": code}


def _calls(draw: random.Random) -> Turn:
    return {"calls": [_called(draw)]}


def _commands(draw: random.Random) -> Turn:
    return {"calls": [_command(draw)]}


def _errors(draw: random.Random) -> Turn:
    return {"calls": [{**_called(draw), "failed": True}]}


def _texts(draw: random.Random) -> Turn:
    return {"said": draw.choice(("So.", "So.", "And so.")), "heard": draw.choice(("Go on.", "Go on.", "Use a tool."))}


def _mixed(draw: random.Random) -> Turn:
    return draw.choice((_calls, _commands, _texts))(draw)


def _several(draw: random.Random) -> Turn:
    return {"calls": [_called(draw) for _ in range(draw.choice((1, 2, 3)))]}


KINDS: dict[str, Callable[[random.Random], Turn]] = {
    "calls": _calls,
    "commands": _commands,
    "outputs": _commands,
    "errors": _errors,
    "thoughts": _calls,
    "texts": _texts,
    "mixed": _mixed,
    "several": _several,
}


def _now(kind: str, turn: Turn, draw: random.Random) -> Turn:
    """Return a turn with the parts that differ each time it is taken."""
    if kind == "thoughts":
        return {**turn, "thought": draw.choice(("", "So."))}
    if kind == "outputs":
        took = draw.choice(("0.1 s", "0.2 s"))
        return {"calls": [{**call, "result": f"{call['result']} after {took}"} for call in turn["calls"]]}
    return turn


def turn_cases() -> dict[str, list[Turn]]:
    """Return lists of turns, by kind and number; each ends in its own kind of cycle."""
    cases = {}
    for kind, drawn in KINDS.items():
        draw = random.Random(kind)
        for number in range(N):
            turns = [drawn(draw) for _ in range(draw.randrange(6))]
            around = [drawn(draw) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
            while len(turns) < _MOST_TURNS:
                # sometimes the cycle is interrupted
                turns += around if draw.random() < 0.9 else [drawn(draw)]
            cases[f"{kind} {number}"] = [_now(kind, turn, draw) for turn in turns[:_MOST_TURNS]]
    return cases
