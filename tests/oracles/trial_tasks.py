"""Small tasks with one way to make rewards each, for Harbor's trials and the farm's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.oracles.cases.task_cases import config

_DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
_LOGS = "/logs/verifier"
_OFFLINE = {"network_mode": "no-network"}
_COUNT = f"#!/bin/bash\n[ -e out ] && n=$(wc -l < out) || n=0\necho $((n > 0)) > {_LOGS}/reward.txt\n"
_TWO = [{"name": "a"}, {"name": "b"}]


def _task(table: Mapping[str, object], **files: str) -> dict[str, str]:
    """Return the files of a task. `__` in a name is a slash, `_DOT_` a dot."""
    named = {name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()}
    steps = table.get("steps") or []
    assert isinstance(steps, list)
    instructions = [f"steps/{step['name']}/instruction.md" for step in steps] or ["instruction.md"]
    base = {"task.toml": config({"environment": _OFFLINE, **table}), "environment/Dockerfile": _DOCKERFILE}
    return {**base, **dict.fromkeys(instructions, "Do it.\n"), **named}


def _reward(text: str) -> str:
    return f"#!/bin/bash\n{text} > {_LOGS}/reward.json\n"


_OF_STEPS = _reward('echo "{\\"reward\\": $(cat out 2>/dev/null || echo 0), \\"$NAME\\": 1}"')


def _steps(table: Mapping[str, object], first: str, second: str) -> dict[str, str]:
    return _task(
        table,
        tests__test_DOT_sh=_OF_STEPS,
        steps__a__solution__solve_DOT_sh=first,
        steps__b__solution__solve_DOT_sh=second,
    )


TASKS: dict[str, dict[str, str]] = {
    "one reward": _task({}, tests__test_DOT_sh=_COUNT, solution__solve_DOT_sh="echo x > out"),
    "a solution that fails": _task({}, tests__test_DOT_sh=_COUNT, solution__solve_DOT_sh="echo x > out\nexit 3"),
    "interpreters that scripts name": _task(
        {},
        tests__test_DOT_sh=f"#!/usr/bin/python3\nopen('{_LOGS}/reward.txt', 'w').write(open('out').read() or '0')\n",
        environment__Dockerfile=f"{_DOCKERFILE}RUN touch out\n",
        solution__solve_DOT_sh="#!/usr/bin/python3\nopen('out', 'w').write('0.5')\n",
    ),
    "tests that fail": _task({}, tests__test_DOT_sh=f"{_COUNT}exit 1\n", solution__solve_DOT_sh="echo x > out"),
    "both files": _task(
        {},
        tests__test_DOT_sh=f'{_COUNT}echo \'{{"reward": 0.25, "style": true}}\' > {_LOGS}/reward.json\n',
        solution__solve_DOT_sh="echo x > out",
    ),
    "a reward for work alone": _task(
        {}, tests__test_DOT_sh="[ ! -e out ] || echo 1 > /logs/verifier/reward.txt", solution__solve_DOT_sh="touch out"
    ),
    "variables": _task(
        {
            "environment": {**_OFFLINE, "env": {"A": "${TOKEN}", "B": "x${TOKEN}"}},
            "verifier": {"env": {"C": "${NONE:-c}", "D": "${EMPTY:-d}"}},
            "solution": {"env": {"A": "s", "E": "${TOKEN}"}},
        },
        tests__test_DOT_sh=_reward(
            '[ "$A$B$C$D" = "$(cat want)" ]; n=$?; echo "{\\"same\\": $n, \\"reward\\": $(cat out || echo 9)}"'
        ),
        solution__solve_DOT_sh="echo -n 't''x${TOKEN}c' > want\n[ \"$A$B$E\" = 'sx${TOKEN}t' ]; echo $? > out",
    ),
    "the mean of steps": _steps(
        {
            "steps": [
                {"name": "a", "verifier": {"env": {"NAME": "n"}}},
                {"name": "b", "verifier": {"env": {"NAME": "m"}}},
            ]
        },
        "echo 0.5 > out",
        "echo 1 > out",
    ),
    "the last of steps": _steps(
        {"steps": _TWO, "multi_step_reward_strategy": "final", "verifier": {"env": {"NAME": "n"}}},
        "echo 1 > out",
        "echo 0.25 > out",
    ),
    "a gate that is passed": _steps(
        {"steps": [{"name": "a", "min_reward": 0.5}, {"name": "b"}], "verifier": {"env": {"NAME": "n"}}},
        "echo 0.5 > out",
        "echo 1 > out",
    ),
    "a gate that is not": _steps(
        {
            "steps": [{"name": "a", "min_reward": {"reward": 0.5, "n": 2}}, {"name": "b"}],
            "verifier": {"env": {"NAME": "n"}},
        },
        "echo 0.75 > out",
        "echo 1 > out",
    ),
    "tests of a step over those of the task": {
        **_steps({"steps": _TWO, "verifier": {"env": {"NAME": "n"}}}, "echo 1 > out", "echo 1 > out"),
        "tests/worth": "0.5",
        "steps/b/tests/worth": "0.125",
        "tests/test.sh": _reward('[ -e out ] && n=$(cat /tests/worth) || n=0; echo "{\\"reward\\": $n}"'),
    },
    "files and set-up of steps": {
        **_steps({"steps": _TWO}, "cat given > out", "cat given made > out"),
        "steps/a/workdir/given": "one\n",
        "steps/b/workdir/given": "two\n",
        "steps/b/workdir/setup.sh": "echo three > made\n",
        "tests/test.sh": _reward('echo "{\\"reward\\": $(cat out 2>/dev/null | wc -l)}"'),
    },
    "artefacts": _task(
        {
            "artifacts": [{"source": "/app/out", "exclude": ["*.tmp", "no"]}, "/app/file"],
            "verifier": {"environment_mode": "separate", "collect": [{"command": "echo h > /app/out/hook"}]},
        },
        tests__test_DOT_sh=_reward('n=$(cd /app; find . -type f 2>/dev/null | wc -l); echo "{\\"reward\\": $n}"'),
        solution__solve_DOT_sh="mkdir -p out/no out/yes\ncd out\ntouch a b.tmp no/x yes/y ../file /logs/artifacts/z",
    ),
    "a verifier's own image": _task(
        {"artifacts": ["/app/file"], "verifier": {"environment_mode": "separate"}},
        tests__Dockerfile="FROM debian:bookworm-slim\nWORKDIR /own\nCOPY test.sh /tests/test.sh\n",
        tests__test_DOT_sh=_reward(
            '[ -e /app/file ] && n=1 || n=0; [ "$PWD" = /own ] || n=5; echo "{\\"reward\\": $n}"'
        ),
        solution__solve_DOT_sh="touch file",
    ),
    "a verifier of a step alone": {
        **_steps(
            {
                "artifacts": ["/app/out"],
                "steps": [{"name": "a", "verifier": {"environment_mode": "separate"}}, {"name": "b"}],
            },
            "echo 1 > out\ntouch other",
            "echo 1 > out",
        ),
        "tests/test.sh": _reward(
            '[ -e /app/other ] && n=1 || n=0; echo "{\\"reward\\": $(cat /app/out || echo 0), \\"o\\": $n}"'
        ),
    },
}


def written(top: Path) -> dict[str, Path]:
    """Write all tasks below a folder; return their folders by name."""
    folders = {}
    for number, (name, files) in enumerate(TASKS.items()):
        folders[name] = top / f"task-{number}"
        for path, text in files.items():
            target = folders[name] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(0o755 if target.suffix == ".sh" else 0o644)
    return folders
