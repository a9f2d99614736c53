"""Tasks of terminal-bench 1 (`task.yaml`), converted to Harbor's format on reading; terminal-bench 2 uses that itself.

The result is 1 if the summary of `pytest -rA` has tests, and none that failed or unexpectedly passed; with the parser
`swebench`, if the block between its marks says PASSED; else 0, like terminal-bench's own parsers and harness. The
conversion follows Harbor's `mappers/terminal_bench.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from farm.errors import InvalidRequest
from farm.tasks.compose import ComposeFile, OwnMount, read_compose, read_yaml
from farm.tasks.harbor_config import Seconds

_COMPOSE = "docker-compose.yaml"
_DOCKERFILE = "Dockerfile"
_CONTINUED = re.compile(r"\\[ \t]*\n")
_PARSERS = ("pytest", "swebench")
_OUTSIDE_A_NAME = re.compile(r"[^A-Za-z0-9._-]+|\.(?=\.)")
_OF_HARNESS = {"task.yaml", "solution.sh", "solution.yaml", "run-tests.sh", "tests", _COMPOSE}


class TerminalBenchTask(BaseModel):
    """A `task.yaml`; keys that only describe the task are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instruction: str = Field(min_length=1)
    parser_name: str = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 60.0
    difficulty: str = "unknown"
    category: str = ""
    tags: Annotated[tuple[str, ...], BeforeValidator(lambda given: given or ())] = ()


def convert(source: Path, target: Path) -> None:
    """Write a Harbor task into `target`, an empty folder. Raises InvalidRequest for parts that cannot be converted."""
    try:
        task = TerminalBenchTask.model_validate(read_yaml(source / "task.yaml"))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(
            first["msg"], field=f"{source / 'task.yaml'}: {'.'.join(map(str, first['loc']))}"
        ) from None
    if task.parser_name not in _PARSERS:
        known = " or ".join(_PARSERS)
        raise InvalidRequest(f"its results need the parser {task.parser_name!r}, not {known}", field=str(source))
    if not (source / "run-tests.sh").is_file():
        raise InvalidRequest("there is no run-tests.sh", field=str(source))
    compose = read_compose(source / _COMPOSE, "client") if (source / _COMPOSE).is_file() else ComposeFile(main="client")
    (target / "instruction.md").write_text(task.instruction, encoding="utf-8")
    (target / "task.toml").write_text(_config(task, compose, source.resolve().name), encoding="utf-8")
    _environment(source, target / "environment", compose)
    _tests(source, target / "tests", task.parser_name, [each for each in compose.own_mounts if each.read_only])
    _solution(source, target / "solution")


def _config(task: TerminalBenchTask, compose: ComposeFile, name: str) -> str:
    """Return the task.toml; JSON texts are also TOML texts."""
    lines = [
        'schema_version = "1.4"',
        "[task]",
        f"name = {json.dumps(f'terminal-bench/{_plain(name)}')}",
        "[metadata]",
        f"difficulty = {json.dumps(task.difficulty)}",
        f"category = {json.dumps(task.category)}",
        f"tags = {json.dumps(task.tags)}",
        "[agent]",
        f"timeout_sec = {task.max_agent_timeout_sec}",
        "[verifier]",
        f"timeout_sec = {task.max_test_timeout_sec}",
        "[environment]",
        *([f"workdir = {json.dumps(compose.workdir)}"] if compose.workdir else []),
        "[environment.env]",
        'TEST_DIR = "/tests"',
        *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in compose.environment),
    ]
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """Return a folder's name with characters replaced that a task name cannot have: `001. hello` is `001.-hello`."""
    return _OUTSIDE_A_NAME.sub("-", name).lstrip("._-") or "task"


def _environment(source: Path, target: Path, compose: ComposeFile) -> None:
    """Copy the build context: the whole task without files of the harness, unless the Dockerfile copies these."""
    context = source / compose.context if compose.context not in ("", ".") else source
    if not context.resolve().is_relative_to(source.resolve()):
        raise InvalidRequest(f"its build context {compose.context!r} lies outside the task", field=str(source))
    dockerfile = context / (compose.dockerfile or _DOCKERFILE)
    if compose.dockerfile and not (dockerfile.is_file() and dockerfile.resolve().is_relative_to(source.resolve())):
        raise InvalidRequest(f"its compose file builds {compose.dockerfile!r}, which does not exist", field=str(source))
    text = dockerfile.read_text(encoding="utf-8", errors="replace") if dockerfile.is_file() else ""
    lines = _CONTINUED.sub(" ", text).splitlines()
    copies = " ".join(line for line in lines if line.strip().upper().startswith(("COPY", "ADD", "RUN --MOUNT")))
    left_out = {name for name in _OF_HARNESS if name not in copies} if context == source else set()

    def outer(folder: str, names: list[str]) -> set[str]:
        return left_out.intersection(names) if Path(folder) == context else set()

    shutil.copytree(context, target, symlinks=True, ignore=outer)
    if text:
        written = target / _DOCKERFILE
        # it may be a link
        written.unlink(missing_ok=True)
        written.write_text(_with_arguments(text, compose.arguments), encoding="utf-8", errors="replace")
        if (ignore := dockerfile.with_name(f"{dockerfile.name}.dockerignore")).is_file():
            shutil.copy(ignore, target / f"{_DOCKERFILE}.dockerignore")
    for mount in compose.own_mounts:
        copy = _copy_mount(source, mount, target)
        line = json.dumps([copy, mount.target.rstrip("/") + ("/" if copy.endswith("/") else "")])
        with (target / _DOCKERFILE).open("a", encoding="utf-8") as file:
            file.write(f"\nCOPY {line}\n")
        for ignore in (target / ".dockerignore", target / f"{_DOCKERFILE}.dockerignore"):
            if ignore.is_file():
                # a mount includes files that a build leaves out
                with ignore.open("a", encoding="utf-8") as file:
                    file.write(f"\n!{copy.rstrip('/')}\n")
    # in the form that Harbor reads, which shows the other services
    if compose.sidecars or compose.mounts or compose.privileged or compose.other:
        shutil.copy(source / _COMPOSE, target / _COMPOSE)
    elif compose.entrypoint or compose.command or compose.healthcheck:
        program = {"entrypoint": compose.entrypoint, "command": compose.command, "healthcheck": compose.healthcheck}
        (target / _COMPOSE).write_text(json.dumps({"services": {"main": program}}), encoding="utf-8")


def _with_arguments(dockerfile: str, arguments: Sequence[tuple[str, str]]) -> str:
    """Return a Dockerfile whose declared arguments default to the values in a compose file."""
    for name, value in arguments:
        declared = re.compile(rf"^([ \t]*ARG[ \t]+{re.escape(name)})(=.*)?[ \t]*$", re.MULTILINE | re.IGNORECASE)
        quoted = json.dumps(value, ensure_ascii=False).replace("$", "\\$")
        dockerfile = declared.sub(lambda line: f"{line[1]}={quoted}", dockerfile)  # noqa: B023 - it is called at once
    return dockerfile


def _copy_mount(source: Path, mount: OwnMount, target: Path) -> str:
    """Copy a mounted part of the task, so that every sandbox has its own copy. Return the copy's name in `target`.

    Files of the harness, such as the solution, are left out of a mount of the whole task. A missing source becomes an
    empty folder, as in Docker. The name ends with a slash for a folder.
    """
    mounted = source / mount.source
    if not mounted.resolve().is_relative_to(source.resolve()):
        raise InvalidRequest(f"its compose file mounts {mount.source!r}, which is not in the task", field=str(source))
    name = f".mount-{hashlib.sha256(mount.target.encode()).hexdigest()[:8]}"
    if mounted.is_file():
        shutil.copy(mounted, target / name)
        return name
    if mounted.is_dir():
        left_out = shutil.ignore_patterns(*_OF_HARNESS, _DOCKERFILE) if mounted.samefile(source) else None
        shutil.copytree(mounted, target / name, symlinks=True, ignore=left_out)
    else:
        (target / name).mkdir()
    return f"{name}/"


def _tests(source: Path, target: Path, parser: str, read_only: Sequence[OwnMount]) -> None:
    if (source / "tests").is_dir():
        shutil.copytree(source / "tests", target, symlinks=True)
    target.mkdir(exist_ok=True)
    shutil.copy(source / "run-tests.sh", target / "run-tests.sh")
    test = target / "test.sh"
    script = files("farm.tasks").joinpath("terminal_bench_test.sh").read_text(encoding="utf-8")
    lines = [f"parser={parser}"]
    for mount in read_only:
        if mount.target.startswith(("/tests/", "/logs/")) or mount.target in ("/tests", "/logs"):
            # the verifier's own folders
            continue
        copy = _copy_mount(source, mount, target).rstrip("/")
        lines.append(f"own {copy} {shlex.quote(mount.target.rstrip('/'))}")
    test.write_text(script.replace(f"parser={_PARSERS[0]}", "\n".join(lines), 1))
    test.chmod(0o755)


def _solution(source: Path, target: Path) -> None:
    target.mkdir()
    if (source / "solution.sh").is_file():
        shutil.copy(source / "solution.sh", target / "solve.sh")
    elif (source / "solution.yaml").is_file():
        (target / "solve.sh").write_text("#!/bin/bash\n" + "\n".join(_commands(source / "solution.yaml")) + "\n")
    else:
        target.rmdir()


def _commands(path: Path) -> list[str]:
    try:
        import yaml

        steps: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [str(step["command"] if isinstance(step, dict) else step) for step in steps]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"it is not a list of commands: {error}", field=str(path)) from error
