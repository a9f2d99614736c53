"""Tasks of terminal-bench 1, and the output of their tests: always the same."""

from __future__ import annotations

import itertools
import json
import random

from tests.oracles.cases.task_cases import Files

_COMPOSE = """\
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [sh, -c, sleep infinity]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
_YAML = "instruction: |-\n  Say hello.\ndifficulty: easy\nparser_name: pytest\n"
TASK: dict[str, str] = {
    "task.yaml": _YAML,
    "Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "docker-compose.yaml": _COMPOSE,
    "solution.sh": "echo hello > /app/out\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "def test_x(): pass\n",
}
_ENVIRONMENT = "      - TEST_DIR=${T_BENCH_TEST_DIR}\n"
_VALUES = ("1", "90.5", "'90'", "0", "-1", ".inf", ".nan", "x", "[]", "null", "true")


def _with(old: str, new: str) -> Files:
    return {"docker-compose.yaml": _COMPOSE.replace(old, new)}


def task_yaml_cases() -> dict[str, Files]:
    """Return tasks with special values in task.yaml."""
    fields = {
        "instruction": ("x", "' x '", "|-\n  a\n  b", "|\n  a\n", "''", "3", "[]", "null"),
        "max_agent_timeout_sec": _VALUES,
        "max_test_timeout_sec": _VALUES,
        "parser_name": ("pytest", "swebench", "swelancer", "mlebench", "sweperf", "other", "Pytest", "3"),
        "difficulty": ("easy", "hard", "unknown", "extreme", "3"),
        "category": ("x", "3"),
        "tags": ("[]", "[a, b]", "a", "null", "[1]"),
        "run_tests_in_same_shell": ("true", "false"),
        "disable_asciinema": ("true",),
        "estimated_duration_sec": ("3", "null", "x"),
        "unknown": ("1",),
    }
    cases: dict[str, Files] = {"a plain one": {}}
    for field, values in fields.items():
        rest = [line for line in ("instruction: x", "difficulty: easy") if not line.startswith(f"{field}:")]
        for value in values:
            cases[f"{field}: {json.dumps(value)}"] = {"task.yaml": "\n".join([*rest, f"{field}: {value}"]) + "\n"}
    texts = (
        "",
        "[]",
        "instruction: [",
        "difficulty: easy\n",
        "instruction: x\n",
        "# canary\ninstruction: x\ndifficulty: easy\n",
    )
    return cases | {f"task.yaml: {text!r}": {"task.yaml": text} for text in texts}


def conversion_cases() -> dict[str, Files]:
    """Return tasks with special files."""
    services: dict[str, Files] = {
        "a variable": _with(_ENVIRONMENT, f"{_ENVIRONMENT}      - A=b c\n"),
        "variables by name": _with("      - TEST_DIR=${T_BENCH_TEST_DIR}\n", "      A: b\n      N: 1\n"),
        "a working directory": _with("    volumes:", "    working_dir: /srv\n    volumes:"),
        "a port": _with("    volumes:", "    expose: [80]\n    volumes:"),
        "an entry point": _with("    volumes:", "    entrypoint: [sh]\n    volumes:"),
        "a platform": _with("    volumes:", "    platform: linux/amd64\n    volumes:"),
        "published ports": _with("    volumes:", "    ports: ['80:80']\n    volumes:"),
        "a folder to build in": _with(
            "build: {dockerfile: Dockerfile}", "build: {context: ./sub, dockerfile: Dockerfile}"
        ),
        "a short folder to build in": _with("build: {dockerfile: Dockerfile}", "build: ./sub"),
        "its own folder": _with("    volumes:\n", "    volumes:\n      - ./:/app\n"),
        "a folder that is not there": _with("    volumes:\n", "    volumes:\n      - ./runs:/app/runs\n"),
        "a folder of the host": _with("    volumes:\n", "    volumes:\n      - /etc:/host\n"),
        "privileges": _with("    volumes:", "    privileged: true\n    volumes:"),
        "a sidecar": _with("services:\n", "services:\n  db:\n    image: postgres\n"),
        "another name": _with("  client:\n", "  app:\n"),
        "the network of the host": _with("    volumes:", "    network_mode: host\n    volumes:"),
        "no compose file": {"docker-compose.yaml": None},
        "a compose file without services": {"docker-compose.yaml": "services: {}\n"},
    }
    for name in ("a folder to build in", "a short folder to build in"):
        services[name] = services[name] | {"sub/Dockerfile": "FROM scratch\n", "sub/x": "1", "Dockerfile": None}
    files: dict[str, Files] = {
        "a plain one": {},
        "data": {"data/x.txt": "1", "y": "2"},
        "a Dockerfile that copies the solution": {"Dockerfile": "FROM scratch\nCOPY solution.sh /x\n"},
        "a Dockerfile that copies the tests": {"Dockerfile": "FROM scratch\nCOPY tests /x\n"},
        "commands for a solution": {"solution.sh": None, "solution.yaml": "- command: echo a\n- command: echo b\n"},
        "no solution": {"solution.sh": None},
        "no tests": {"tests/test_outputs.py": None},
        "no run-tests.sh": {"run-tests.sh": None},
        "no Dockerfile": {"Dockerfile": None},
        "more tests": {"tests/data/x": "1", "tests/conftest.py": ""},
    }
    return {
        **{f"with {name}": each for name, each in files.items()},
        **{f"compose: {k}": v for k, v in services.items()},
    }


_LINES = (
    *(
        "PASSED t.py::a",
        "PASSED t.py::b",
        "FAILED t.py::a - assert 1",
        "FAILED t.py::a",
        "ERROR t.py::c - x",
        "ERROR t.py",
    ),
    *(
        "SKIPPED [1] t.py:3: no",
        "XFAIL t.py::d - r",
        "XPASS t.py::e",
        "XPASS t.py::e r",
        "PASSED",
        "FAILED",
        "PASSED u.py::a",
    ),
    *(
        "  PASSED t.py::f",
        "PASSED: t.py::g",
        "passed t.py::h",
        "FAILED t.py::p[a - b] - x",
        "PASSED t.py::p[a",
        "PASSED t.py::",
    ),
    *(
        "==== 1 passed in 0.1s ====",
        "",
        "other text",
        "FAILEDx t.py::a",
        "PASSED\tt.py::i",
        "XFAIL t.py::a",
        "UNKNOWN t.py::j",
    ),
    *("FAILED t.py::a - b - c", "PASSED t.py::a\rFAILED t.py::b", "PASSED  t.py::k  ", "::", "FAILED - x", "SKIPPED"),
)
_TITLES = (
    "=== short test summary info ===",
    "=========================== short test summary info ============================",
    "=== SHORT Test summary info ===",
    "short test summary info",
    "=short test summary info=",
    "x=== short test summary info ===y",
    "=== short test  summary info ===",
)
_MARKS = "SWEBench results starts here\n{}\nSWEBench results ends here\n"


def output_cases() -> dict[str, dict[str, str]]:
    """Return outputs of tests, and the parser of each."""
    texts = {"": "nothing", "PASSED t.py::a\n": "no title"}
    for title, line in itertools.product(_TITLES, ("PASSED t.py::a", "FAILED t.py::a", "")):
        texts[f"...\n{title}\n{line}\n"] = f"{title!r}, {line!r}"
    title = _TITLES[0]
    for line in _LINES:
        texts[f"{title}\n{line}\n"] = f"only {line!r}"
        texts[f"{title}\nPASSED t.py::z\n{line}"] = f"last {line!r}"
    dice = random.Random(20261127)
    for number in range(150):
        lines = [dice.choice(_LINES) for _ in range(dice.randint(1, 6))]
        before = dice.choice(("", "PASSED t.py::q\n", "FAILED t.py::q\n"))
        texts[f"{before}{title}\n" + "\n".join(lines) + "\n"] = f"drawn {number}"
    texts[f"{title}\nPASSED t.py::a\n{title}\nFAILED t.py::b\n"] = "two titles"
    texts[f"x {title} PASSED t.py::a\n"] = "a result on the line of the title"
    cases = {f"pytest: {name}": {"parser": "pytest", "text": text} for text, name in texts.items()}
    blocks = (
        "PASSED",
        " PASSED ",
        "FAILED",
        "",
        "PASSED PASSED",
        "passed",
        "PASSED\n\n",
        "PASSED\r",
        "x\nPASSED",
        "PASSED\x0b",
    )
    marked = {
        **{f"a block {block!r}": _MARKS.format(block) for block in blocks},
        "no block": "PASSED\n",
        "no end": _MARKS.format("PASSED").replace("ends", "begins"),
        "no start": _MARKS.format("PASSED").replace("starts", "begins"),
        "an end before the start": "SWEBench results ends here\nSWEBench results starts here\nPASSED\n",
        "two blocks": _MARKS.format("PASSED") * 2,
        "two blocks of two results": _MARKS.format("PASSED") + _MARKS.format("FAILED"),
        "text around": "noise\n" + _MARKS.format("PASSED") + "after\n",
        "on one line": "SWEBench results starts herePASSEDSWEBench results ends here",
    }
    return cases | {f"swebench: {name}": {"parser": "swebench", "text": text} for name, text in marked.items()}
