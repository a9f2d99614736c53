"""Harbor tasks that differ from a plain one in one value each, and generated ones with many values: always the same.

Values are in fields that Harbor has: valid ones, ones at an edge, and ones of another type.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Files: TypeAlias = dict[str, str | None]
Values: TypeAlias = tuple[Any, ...]

N_DRAWN = 300
TASK: dict[str, str] = {
    "task.toml": "",
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "true\n",
}
"""The files of every case in addition to its own; a file with None for its text is omitted."""
_INF, _NAN = math.inf, math.nan
_SECONDS: Values = (1, 60.5, 1e6, "90", 0, -1, _INF, _NAN, "x", True, [])
_COUNTS: Values = (1, 2.0, 4096, "2", 0, -1, 2.5, _INF, "x", True, [])
_TEXTS: Values = ("x", "", " ", "ünï", 3, True, [])
_USERS: Values = ("agent", 1000, "0", "", 1.5, True, [])
_MODES = ("public", "no-network", "allowlist", "Public", "", 1)
_HOSTS: Values = ([], ["example.org"], ["*.example.org"], ["http://x"], "example.org", [1])
_FLAGS: Values = (True, False, "true", "false", "no", 1, 0, 2, "maybe", [])
_ENV: Values = (
    {},
    {"A": "b"},
    {"A": "${TOKEN}"},
    {"A": "x${TOKEN}"},
    {"A": "${EMPTY:-d}"},
    {"A": "${NONE:-d}"},
    {"A": "${NONE:-}"},
    {"A": "${NONE}"},
    {"A": "${TOKEN} ${TOKEN}"},
    {"A": "$TOKEN ${}"},
    {"A": "${NONE:-${TOKEN}}"},
    {"A": 1},
    [],
)
_SIZES: Values = (
    "2G",
    "512M",
    "1.5g",
    " 1G ",
    "2048K",
    "1K",
    "2GB",
    "G",
    "",
    "infG",
    "nanM",
    "-1G",
    "2",
    2,
    2.5,
    True,
    [],
)
_CHECKS: Values = (
    {"command": "true"},
    {"command": ""},
    {},
    *({"command": "true", name: value} for name in ("interval_sec", "start_period_sec") for value in (0, 2.5, -1)),
    *({"command": "true", "timeout_sec": value} for value in (3, 0, -1, "x")),
    *({"command": "true", "retries": value} for value in (1, 0, -1, 2.5, "2")),
)
_NETWORK = {"network_mode": _MODES, "allowed_hosts": _HOSTS}
_ENVIRONMENT: Mapping[str, Values] = {
    **_NETWORK,
    "allow_internet": _FLAGS,
    "build_timeout_sec": _SECONDS,
    "docker_image": ("debian:12", "", 1),
    "os": ("linux", "Linux", "windows", "plan9", 1),
    "cpus": (1, 2.0, 0.5, "2", 0, -1, _INF, _NAN, True, []),
    "memory_mb": _COUNTS,
    "storage_mb": _COUNTS,
    "memory": _SIZES,
    "storage": _SIZES,
    "gpus": (0, 1, -1, "1", 1.5, []),
    "gpu_types": (["H100"], [], "H100", [1]),
    "tpu": ({"type": "v6e", "topology": "2x4"}, {"type": "v6e"}, {"type": "", "topology": "2x4"}, "v6e"),
    "mcp_servers": ([], [{"name": "m", "url": "http://m"}], [{"name": "m"}], [{}], {}),
    "env": _ENV,
    "skills_dir": _TEXTS,
    "healthcheck": _CHECKS,
    "workdir": ("/app", "", "app", 1),
    "unknown": (1,),
}
_AGENT: Mapping[str, Values] = {**_NETWORK, "timeout_sec": _SECONDS, "user": _USERS, "unknown": (1,)}
_HOOKS: Values = (
    [{"command": "true"}],
    [{"command": "true", "timeout_sec": 5}, {"command": "false"}],
    [{"command": ""}],
    [{}],
    *([{"command": "true", "service": name}] for name in ("main", " main ", "db", "", "a b", "-x", "a\n", 1)),
    *([{"command": "true", "user": user}] for user in _USERS[:3]),
    *([{"command": "true", "timeout_sec": value}] for value in (0, -1, "x")),
)
_VERIFIER: Mapping[str, Values] = {
    **_NETWORK,
    "timeout_sec": _SECONDS,
    "env": _ENV,
    "user": _USERS,
    "environment_mode": ("shared", "separate", "Shared", "", 1),
    "environment": ({}, {"docker_image": "v:1"}, {"cpus": 2, "network_mode": "no-network"}, 1),
    "collect": _HOOKS,
}
_ARTEFACTS: Values = (
    [],
    ["/app/x", "y"],
    ["/logs/artifacts"],
    ["/logs/artifacts/"],
    ["/app/../x"],
    [""],
    [{}],
    [1],
    "x",
    [{"source": "/app", "exclude": ["*.o", "b/"]}],
    *(
        [{"source": "/app", "destination": each}]
        for each in ("d", "", "/d", "../d", "a\\b", ".", "manifest.json", "d/", 1)
    ),
    *([{"source": each, "service": "db"}] for each in ("/x", "x", "C:/x")),
    *([{"source": "/x", "service": each}] for each in ("main", "", "a b", 1)),
)
_TASK: Mapping[str, Values] = {
    "schema_version": ("1.0", "1.4", "2.0", "", 1.0),
    "version": ("1.0", "1.3", "9", 1),
    "source": ("x", 1),
    "metadata": ({}, {"difficulty": "easy", "n": 1}, 1, []),
    "multi_step_reward_strategy": ("mean", "final", "best", ""),
    "artifacts": _ARTEFACTS,
    "solution": ({}, {"env": {"A": "${TOKEN}"}}, {"env": []}, 1),
    "agent": (1, []),
    "steps": ([], {}, "x"),
    "unknown": (1, {"x": 1}),
}
_PACKAGE: Mapping[str, Values] = {
    "name": (
        "a/b",
        "A.b/c-d_e",
        "a",
        "a/",
        "/b",
        "-a/b",
        "a/_b",
        "_a/b",
        ".a/b",
        "a/b..c",
        "a/b/c",
        "a b/c",
        "a/b\n",
        1,
    ),
    "version": ("1", "", 1),
    "description": _TEXTS,
    "authors": ([], [{"name": "n"}], [{"name": "n", "email": "e"}], [{"email": "e"}], ["n"], "n"),
    "keywords": ([], ["k"], "k", [1]),
}
_STEP_NAMES = (
    *("a", "two words", "ä", ".", "..", "a.", "a ", " ", "", "a/b", "a\\b", 'a"b', "a:b", "a\tb", ".a", "a.b"),
    *("CON", "con.txt", "nul", "COM1", "com0", "LPT9.x", "console", "é" * 127, "é" * 128, "x" * 255, "x" * 256),
)
_STEP: Mapping[str, Values] = {
    "min_reward": (1, 0.5, "1", True, {"a": 1}, {"a": "x"}, {}, "x", []),
    "healthcheck": _CHECKS,
    "artifacts": _ARTEFACTS,
}
_INSTRUCTIONS = (
    *("", " \n", "\n\nGo.\n", "Go.\r\n", "\ufeffGo.", "# canary\n", "<!-- CANARY x -->\n# My Canary: y\n\n\nGo.\n"),
    *("Go.\n# canary\n", " # canary GUID 1\nGo.", "<!-- canary\n-->\nGo.", "#Canary\nGo.", "# A bird\nGo.", "\tGo."),
)


def toml(value: Any) -> str:
    """Return a value as TOML, tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def config(table: Mapping[str, Any]) -> str:
    """Return a complete task.toml."""
    return "".join(f"{name} = {toml(each)}\n" for name, each in table.items())


def _stepped(*steps: Mapping[str, Any], **rest: Any) -> Files:
    """Return the files of a task with these steps, each with its own instruction and tests."""
    files: Files = {"task.toml": config({"steps": list(map(dict, steps)), **rest}), "instruction.md": None}
    for step in steps:
        if isinstance(step.get("name"), str) and "/" not in step["name"] and "\0" not in step["name"]:
            try:
                step["name"].encode()[255]
            except IndexError:
                files |= {
                    f"steps/{step['name']}/instruction.md": "Do.\n",
                    f"steps/{step['name']}/tests/test.sh": "true\n",
                }
    return {name: text for name, text in files.items() if "//" not in name}


def _one_value() -> Iterator[tuple[str, Files]]:
    for field, values in _TASK.items():
        for value in values:
            yield f"{field} = {toml(value)}", {"task.toml": config({field: value})}
    tables = (("task", _PACKAGE), ("agent", _AGENT), ("environment", _ENVIRONMENT), ("verifier", _VERIFIER))
    for table, fields in tables:
        rest = {"name": "a/b"} if table == "task" else {}
        for field, values in fields.items():
            for value in values:
                yield f"{table}.{field} = {toml(value)}", {"task.toml": config({table: {**rest, field: value}})}
    for field, values in _ENVIRONMENT.items():
        for value in values:
            verifier = {"environment": {field: value}}
            yield f"verifier.environment.{field} = {toml(value)}", {"task.toml": config({"verifier": verifier})}
    for artefacts in _ARTEFACTS:
        separate = {"artifacts": artefacts, "verifier": {"environment_mode": "separate"}}
        yield f"separate, artifacts = {toml(artefacts)}", {"task.toml": config(separate)}
    for table, fields in (("agent", _AGENT), ("verifier", _VERIFIER)):
        for field, values in fields.items():
            for value in values:
                step = {"name": "a", table: {field: value}}
                yield f"steps.{table}.{field} = {toml(value)}", _stepped(step, {"name": "b"})
    for field, values in _STEP.items():
        for value in values:
            yield f"steps.{field} = {toml(value)}", _stepped({"name": "a", field: value})
    for name in _STEP_NAMES:
        yield f"steps.name = {toml(name)}", _stepped({"name": name})
    for pair in (("a", "A"), ("é", "e\u0301"), ("ß", "SS"), ("a", "b")):
        yield f"steps.name = {toml(list(pair))}", _stepped(*({"name": name} for name in pair))
    for text in _INSTRUCTIONS:
        yield f"instruction.md = {toml(text)}", {"instruction.md": text}
        files = _stepped({"name": "a"})
        yield f"steps/a/instruction.md = {toml(text)}", {**files, "steps/a/instruction.md": text}


def _pairs() -> Iterator[tuple[str, Files]]:
    for size in ("2G", "3G"):
        for name in ("memory", "storage"):
            table = {name: size, f"{name}_mb": 2048}
            yield f"environment = {toml(table)}", {"task.toml": config({"environment": table})}
    for hosts in _HOSTS:
        for mode in ("allowlist", "public"):
            for internet in (None, True, False):
                table = {"network_mode": mode, "allowed_hosts": hosts}
                table |= {} if internet is None else {"allow_internet": internet}
                for name in ("environment", "agent", "verifier"):
                    yield f"{name} = {toml(table)}", {"task.toml": config({name: table})}
        for internet in (True, False):
            table = {"allowed_hosts": hosts, "allow_internet": internet}
            yield f"environment = {toml(table)}", {"task.toml": config({"environment": table})}


def _layouts() -> Iterator[tuple[str, Files]]:
    image = {"docker_image": "debian:12"}
    for name in ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"):
        yield f"without {name}", {name: None}
        yield f"with an image, without {name}", {"task.toml": config({"environment": image}), name: None}
    broken = ("x =", "x = 1\nx = 2", "[[steps", "\ufeffsource = 'x'", "")
    for text in broken:
        yield f"task.toml: {toml(text)}", {"task.toml": text}
    compose: Files = {"environment/docker-compose.yaml": "services:\n  main:\n    image: debian:12\n"}
    yield "a compose file for a Dockerfile", {**compose, "environment/Dockerfile": None}
    yield "a compose file beside a Dockerfile", compose
    yield "a test.bat", {"tests/test.sh": None, "tests/test.bat": "echo 1"}
    windows: Files = {"task.toml": config({"environment": {"os": "windows"}}), "tests/test.bat": "echo 1"}
    yield "a test.bat of Windows", {"tests/test.sh": None, **windows}
    yield "an earlier conversation", {"trajectory.json": "{}"}
    yield "files of a step without steps", {"steps/a/instruction.md": "x", "steps/a/tests/test.sh": "x"}
    yield "ignored solution", {"solution/.harborignore": "solve.sh\n"}
    yield "ignored tests", {"tests/.harborignore": "*.sh\n"}
    step = _stepped({"name": "a"}, {"name": "b"})
    yield "steps that share tests", {**step, "steps/a/tests/test.sh": None, "steps/b/tests/test.sh": None}
    yield "a step without tests", {**step, "steps/b/tests/test.sh": None, "tests/test.sh": None}
    yield "a step without an instruction", {**step, "steps/b/instruction.md": None}
    yield "a step's solution", {**step, "steps/a/solution/solve.sh": "true"}
    yield "a step's solution that lacks its script", {**step, "steps/a/solution/x": ""}
    yield "a step's set-up", {**step, "steps/b/workdir/setup.sh": "true", "steps/a/workdir/x": ""}
    for own in ({}, {"docker_image": "s:1"}, {"cpus": 1}, None):
        for shared in ({}, {"docker_image": "v:1"}, {"cpus": 2}, None):
            for places in ((), ("steps/a/tests",), ("tests",), ("steps/a/tests", "tests")):
                for mode in ("separate", "shared", None):
                    yield _verifiers(own, shared, places, mode)
    for mode in ("separate", "shared"):
        table = config({"verifier": {"environment_mode": mode}})
        for name in ("tests/Dockerfile", "tests/docker-compose.yaml"):
            files: Files = {"task.toml": table, name: "services: {main: {image: x}}"}
            yield f"{mode} with {name}", files
            yield f"{mode} with {name}, without test.sh", {**files, "tests/test.sh": None}


def _verifiers(
    own: Mapping[str, Any] | None, shared: Mapping[str, Any] | None, places: tuple[str, ...], mode: str | None
) -> tuple[str, Files]:
    """Return a task whose verifier's image may come from a step, from the task and from files."""
    verifier: dict[str, Any] = {"environment_mode": mode} if mode else {}
    table = verifier | ({} if own is None else {"environment": dict(own)})
    rest = {"verifier": {"environment": dict(shared)}} if shared is not None else {}
    files = _stepped(
        {"name": "a", "verifier": table}, {"name": "b"}, environment={"workdir": "/app", "cpus": 4}, **rest
    )
    files |= {f"{place}/Dockerfile": "FROM scratch\n" for place in places}
    return f"step {mode} {own}, task {shared}, Dockerfiles {places}", files


def _drawn() -> Iterator[tuple[str, Files]]:
    """Yield tasks with many values, most of them valid: interactions between tables are visible only there."""
    dice = random.Random(20261127)

    def table(fields: Mapping[str, Values], share: float) -> dict[str, Any]:
        return {name: dice.choice(values[:3]) for name, values in fields.items() if dice.random() < share}

    def environment() -> dict[str, Any]:
        left_out = (
            "tpu",
            "mcp_servers",
            "gpus",
            "os",
            "memory",
            "storage",
            "unknown",
            "allowed_hosts",
            "allow_internet",
        )
        fields = {name: values for name, values in _ENVIRONMENT.items() if name not in left_out}
        return {**table(fields, 0.25), **({"allow_internet": dice.random() < 0.5} if dice.random() < 0.2 else {})}

    def agent() -> dict[str, Any]:
        return table({"timeout_sec": _SECONDS, "network_mode": _MODES, "user": _USERS}, 0.2)

    def verifier() -> dict[str, Any]:
        fields = {"timeout_sec": _SECONDS, "network_mode": _MODES, "env": _ENV, "user": _USERS, "collect": _HOOKS}
        mode = {"environment_mode": dice.choice(("shared", "separate"))} if dice.random() < 0.4 else {}
        own = {"environment": environment()} if dice.random() < 0.3 else {}
        return {**table(fields, 0.2), **mode, **own}

    def step(name: str) -> dict[str, Any]:
        parts = {"agent": agent(), "verifier": verifier()}
        return {"name": name, **{key: part for key, part in parts.items() if dice.random() < 0.5}, **table(_STEP, 0.2)}

    for number in range(N_DRAWN):
        top = {"agent": agent(), "environment": environment(), "verifier": verifier(), **table(_TASK, 0.1)}
        top.pop("steps", None)
        top = {name: each for name, each in top.items() if each or dice.random() < 0.1}
        files: Files = {"task.toml": config(top)}
        if dice.random() < 0.6:
            files = _stepped(*(step(name) for name in "abc"[: dice.randint(1, 3)]), **top)
        for place in ("tests", "steps/a/tests"):
            if dice.random() < 0.2:
                files[f"{place}/Dockerfile"] = "FROM scratch\n"
        yield f"drawn {number}", files


def task_cases() -> dict[str, Files]:
    """Return the cases by a name that describes their difference."""
    return dict([*_one_value(), *_pairs(), *_layouts(), *_drawn()])
