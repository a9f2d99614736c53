"""Folders of Harbor tasks on disk: found, read, or refused with the faulty file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from farm.errors import InvalidRequest
from farm.tasks.compose import ComposeFile, parse_healthcheck, read_compose
from farm.tasks.harbor_config import MAIN_SERVICE, TaskConfig
from farm.tasks.harbor_instance import COMPOSE, DATA_SOURCE, DOCKERFILE, TEST, HarborInstance
from farm.tasks.ignored_files import IGNORE_FILE, IgnoredFiles
from farm.tasks.known_tasks import TaskEvidence
from farm.tasks.terminal_bench import convert

CONFIG = "task.toml"
TERMINAL_BENCH = "task.yaml"
_COMPOSE = f"environment/{COMPOSE}"
_HISTORY = "trajectory.json"
_SCRIPTS = (f"tests/{TEST}", "tests/Dockerfile", f"tests/{COMPOSE}", "solution/solve.sh")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task that can be submitted: its folder, which is archived unchanged, and its fields."""

    path: Path
    instance: HarborInstance

    @property
    def name(self) -> str:
        """The name of its instance."""
        return self.instance.name

    def request(self, archive: str, evidence: TaskEvidence) -> dict[str, Any]:
        """Return its instance for `BatchRequest.instances`, with the digest of its archive and its evidence."""
        fields = self.instance.model_dump(mode="json", exclude_unset=True) | evidence.fields
        return {"data_source": DATA_SOURCE, "instance_id": self.name, "fields": fields, "archive": archive}


def task_paths(folder: Path) -> list[Path]:
    """Return the folders of tasks: the given one, or those below it, by name. Raises InvalidRequest if none."""
    tasks = list(_below(folder, _MOST_DEPTH))
    if not tasks:
        wanted = f"no {CONFIG} and no {TERMINAL_BENCH} in it or in {_MOST_DEPTH} levels of folders below"
        raise InvalidRequest(f"contains no tasks: there is {wanted}", field=str(folder))
    return tasks


def _below(folder: Path, depth: int) -> list[Path]:
    if (folder / CONFIG).is_file() or (folder / TERMINAL_BENCH).is_file():
        return [folder]
    if depth == 0:
        return []
    inner = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    return [task for each in inner if not each.is_symlink() for task in _below(each, depth - 1)]


def read_task(path: Path) -> TaskFolder:
    """Read a folder with a `task.toml`. Raises InvalidRequest that names the faulty file."""
    config = _config(path / CONFIG)
    compose = read_compose(path / _COMPOSE, MAIN_SERVICE) if (path / _COMPOSE).is_file() else ComposeFile()
    steps = [f"steps/{step.name}" for step in config.steps]
    scripts = [*_SCRIPTS, *(f"{step}/{each}" for step in steps for each in (*_SCRIPTS, "workdir/setup.sh"))]
    files = [each for each in (DOCKERFILE, *scripts) if (path / each).is_file()]
    folders = [f"{step}/workdir" for step in steps if (path / step / "workdir").is_dir()]
    fields: dict[str, Any] = {
        "name": config.task.name if config.task else path.resolve().name,
        "task": config.model_dump(mode="json", exclude_unset=True, exclude={"metadata"}),
        "instructions": [_instruction(path / step / "instruction.md") for step in steps or [""]],
        "files": [*files, *folders],
        **_of_compose(compose),
    }
    if (path / _HISTORY).is_file():
        fields["other_needs"] = [*fields.get("other_needs", ()), f"an earlier conversation to go on with ({_HISTORY})"]
    if config.metadata.get("restore") == "nothing":
        fields["restore"] = "nothing"
    try:
        task = TaskFolder(path, HarborInstance.model_validate(fields))
    except ValidationError as error:
        raise _refused(path, error) from None
    _check_ignored(task)
    return task


def _check_ignored(task: TaskFolder) -> None:
    """Refuse a `.harborignore` that cannot be read, or that leaves out a test script."""
    ignored, instance = IgnoredFiles(task.path), task.instance
    for parent in ("", *(f"steps/{step.name}" for step in instance.steps)):
        for folder in ("tests", "solution"):
            for _ in ignored.kept(task.path / parent / folder):
                pass
    for step in instance.steps or (None,):
        script = instance.script(step, "tests", TEST)
        if script and instance.verifier_image(step) is None and ignored.has(task.path / script):
            where = str(task.path / script)
            raise InvalidRequest(f"a {IGNORE_FILE} leaves it out, so no tests would run", field=where)


def _of_compose(compose: ComposeFile) -> dict[str, Any]:
    demands: dict[str, Any] = {
        "env": dict(compose.environment),
        "entrypoint": list(compose.entrypoint),
        "command": list(compose.command),
        "healthcheck": parse_healthcheck(compose.healthcheck),
        "sidecars": list(compose.sidecars),
        "mounts": [*compose.mounts, *(each.source for each in compose.own_mounts)],
        "privileged": compose.privileged,
        "other_needs": [*compose.other, *_of_build(compose)],
    }
    return {name: value for name, value in demands.items() if value}


def _of_build(compose: ComposeFile) -> Iterator[str]:
    """Yield the ways in which a compose file's build of the image differs from its plain Dockerfile."""
    if compose.dockerfile not in ("", "Dockerfile", "./Dockerfile"):
        yield f"another Dockerfile, {compose.dockerfile}, of its compose file"
    if compose.arguments:
        yield f"build arguments of its compose file ({', '.join(name for name, _ in compose.arguments)})"


def _config(path: Path) -> TaskConfig:
    try:
        return TaskConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise _refused(path, error) from None
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"it cannot be read: {error}", field=str(path)) from error


def _instruction(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"there is no instruction to read: {error}", field=str(path)) from error
    lines = text.split("\n")
    # canary marks, which identify tasks in training data, come first and are not for the policy
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    if not lines:
        raise InvalidRequest("it is empty: the policy would get no instruction", field=str(path))
    return "\n".join(lines)


def _refused(path: Path, error: ValidationError) -> InvalidRequest:
    complaints = []
    for each in error.errors():
        field = ".".join(map(str, each["loc"]))
        complaints.append((f"{path}: {field}" if field else str(path), each["msg"].removeprefix("Value error, ")))
    return InvalidRequest.of(complaints)


@contextmanager
def task_folder(path: Path) -> Iterator[TaskFolder]:
    """Yield the task of a folder; terminal-bench 1 is converted in a temporary folder. Raises InvalidRequest."""
    if (path / CONFIG).is_file():
        yield read_task(path)
        return
    with TemporaryDirectory(prefix="farm-task-") as folder:
        converted = Path(folder)
        convert(path, converted)
        try:
            task = read_task(converted)
        except InvalidRequest as error:
            # the temporary folder is gone when the error is read
            complaints = [(field.replace(folder, str(path)), text) for field, text in error.complaints]
            raise InvalidRequest.of(complaints) from None
        yield task
