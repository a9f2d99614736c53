"""Compose files of tasks: the service that the policy runs in, and their further requirements, by name.

A task with one service needs no compose: its image, variables and directory are taken from the file, and everything
else is reported, so that it can be refused. Fields about how Docker itself would run a service have no effect.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import ValidationError

from farm.errors import InvalidRequest
from farm.extras import not_installed
from farm.tasks.harbor_config import HealthcheckTable

_OF_DOCKER = {
    "build",
    "image",
    "container_name",
    "command",
    "deploy",
    "depends_on",
    "expose",
    "ports",
    "platform",
    "init",
    "stdin_open",
    "tty",
    "restart",
    "hostname",
    "labels",
    "pull_policy",
    "stop_grace_period",
    "entrypoint",
    "logging",
}
_READ = {"environment", "working_dir", "volumes", "privileged", "cap_add", "shm_size", "healthcheck"}
_BUILD = {"context", "dockerfile", "args", "tags", "labels", "cache_from", "cache_to", "no_cache", "pull", "platforms"}
SHM_BYTES = 64 << 20
"""The size of /dev/shm in a sandbox; also Docker's default."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"(?=.)(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_WAITS = re.compile(
    r"(\S*/)?(ba|da)?sh|((\S*/)?(ba|da)?sh -l?c )?(exec )?(sleep (infinity|inf|\d+[smhd]?)|tail -f /dev/null)"
)
_HARNESS_MARKS = ("T_BENCH_", "HOST_VERIFIER_LOGS_PATH", "HOST_AGENT_LOGS_PATH", "HOST_ARTIFACTS_PATH")


@dataclass(frozen=True, slots=True)
class OwnMount:
    """A mounted path below the compose file's folder, and its target; `read_only` must not be changed there."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ComposeFile:
    """The requirements in a compose file. `sidecars` are its services other than the main one."""

    main: str = "main"
    sidecars: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    workdir: str = ""
    mounts: tuple[str, ...] = ()
    """Sources outside the file's folder, and named volumes."""
    own_mounts: tuple[OwnMount, ...] = ()
    privileged: bool = False
    other: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """The words of the main service's command; empty for one that only waits."""
    healthcheck: Mapping[str, Any] | None = None
    """The main service's health check as written, but valid; None: the image's own."""
    context: str = ""
    """The build context of the main service, relative to the file's folder; empty without one."""
    dockerfile: str = ""
    """The Dockerfile in that context; empty if none is named."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Build arguments of the main service."""


Healthcheck = HealthcheckTable | Literal["none"]
"""A health check, or "none" for one that switches off the image's."""


def read_compose(path: Path, main: str) -> ComposeFile:
    """Read a compose file. Raises InvalidRequest with its path if it is invalid."""
    content = read_yaml(path)
    services = content.get("services")
    if not isinstance(services, dict) or not services:
        raise InvalidRequest("a compose file without services", field=str(path))
    name = main if main in services else next(iter(services))
    service = services[name] or {}
    if not isinstance(service, dict):
        raise InvalidRequest(f"service {name} is not a table", field=str(path))
    build = service.get("build", "")
    building = build if isinstance(build, dict) else {"context": build}
    mounts = list(_mounts(service.get("volumes")))
    other = [f"`{key}` of service {name}" for key in service if key not in _OF_DOCKER | _READ]
    if (size := service.get("shm_size")) is not None and not _n_bytes(size) <= SHM_BYTES:
        other.append(f"`shm_size: {size}` of service {name}, where a sandbox's /dev/shm has {SHM_BYTES >> 20} MB")
    other += [f"a volume of type tmpfs at {target}" for target in _in_memory(service.get("volumes"))]
    other += [f"`build.{key}` of service {name}" for key in building if key not in _BUILD]
    own = [each for each in mounts if _is_own(each.source) and each.target.startswith("/")]
    return ComposeFile(
        main=name,
        sidecars=tuple(str(each) for each in services if each != name),
        environment=tuple(_environment(service.get("environment")).items()),
        workdir=_plain(service.get("working_dir")),
        mounts=tuple(each.source for each in mounts if each not in own),
        own_mounts=tuple(own),
        privileged=bool(service.get("privileged") or service.get("cap_add")),
        other=tuple(other),
        entrypoint=_program(service.get("entrypoint")),
        command=_program(service.get("command")),
        healthcheck=_valid_healthcheck(service.get("healthcheck"), f"{path}: services.{name}.healthcheck"),
        context=str(building.get("context") or ""),
        dockerfile=str(building.get("dockerfile") or ""),
        arguments=tuple(_environment(building.get("args")).items()),
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a table in YAML. Raises InvalidRequest with the path, NotInstalled without the YAML package."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise not_installed(f"{path}: a task in YAML", str(error.name)) from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"it cannot be read: {error}", field=str(path)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not YAML: {str(error).splitlines()[0]}", field=str(path)) from error
    if not isinstance(content, dict):
        raise InvalidRequest("expected a table of names and values", field=str(path))
    return content


def _environment(given: Any) -> dict[str, str]:
    """Return variables without those that refer to variables of the harness."""
    if isinstance(given, Mapping):
        pairs = {str(name): "" if value is None else str(value) for name, value in given.items()}
    else:
        pairs = dict(str(each).partition("=")[::2] for each in given or ())
    return {name: value for name, value in pairs.items() if not _of_harness(value) and name != "TEST_DIR"}


def _program(given: Any) -> tuple[str, ...]:
    """Return the words of a program, splitting a text like a shell; none for one that only waits."""
    try:
        words = shlex.split(given) if isinstance(given, str) else [str(each) for each in given or ()]
    except (ValueError, TypeError):
        return ()
    return () if _WAITS.fullmatch(" ".join(words)) else tuple(word.replace("$$", "$") for word in words)


def _valid_healthcheck(given: Any, field: str) -> Mapping[str, Any] | None:
    if not (given is None or isinstance(given, Mapping)):
        raise InvalidRequest("a health check is a table", field=field)
    parse_healthcheck(given, field)
    return given


def parse_healthcheck(given: Mapping[str, Any] | None, field: str = "healthcheck") -> Healthcheck | None:
    """Return a health check of a compose file; None if it has no command. Raises InvalidRequest."""
    if given is None:
        return None
    test = given.get("test")
    kind, *words = ["CMD-SHELL", test] if isinstance(test, str) else [str(each) for each in test or ()] or [""]
    if given.get("disable") is True or kind == "NONE":
        return "none"
    if not kind:
        return None
    if kind not in ("CMD", "CMD-SHELL") or not words:
        raise InvalidRequest("its test is a text, or a list that begins with CMD, CMD-SHELL or NONE", field=field)
    interval_s = _seconds(given.get("interval", "30s"), field)
    try:
        return HealthcheckTable(
            command=(words[0] if kind == "CMD-SHELL" else shlex.join(words)).replace("$$", "$"),
            interval_sec=interval_s,
            timeout_sec=_seconds(given.get("timeout", "30s"), field),
            # Docker first checks after an interval
            start_period_sec=_seconds(given.get("start_period", "0s"), field) + interval_s,
            start_interval_sec=min(1.0, interval_s),
            retries=given.get("retries", 3),
        )
    except ValidationError as error:
        raise InvalidRequest(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}", field=field) from None


def _seconds(written: Any, field: str) -> float:
    """Return the seconds of a duration such as `1m30s`. Raises InvalidRequest."""
    match = _DURATION.fullmatch(str(written).strip())
    if match is None:
        raise InvalidRequest(f"{written!r} is no duration such as 30s or 1m30s", field=field)
    return sum(float(number or 0) * unit for number, unit in zip(match.groups(), (3600, 60, 1, 0.001), strict=True))


def _mounts(given: Any) -> Iterator[OwnMount]:
    """Yield volumes without those of the harness."""
    for each in given or ():
        if isinstance(each, Mapping):
            if _is_tmpfs(each):
                continue
            source, target = str(each.get("source", "")), str(each.get("target", ""))
            read_only = each.get("read_only") is True
        else:
            source, target, options = [*str(each).split(":", 2), "", ""][:3]
            read_only = "ro" in options.split(",")
        if not _of_harness(source):
            yield OwnMount(source or str(each), target, read_only)


def _in_memory(given: Any) -> Iterator[str]:
    yield from (str(each.get("target")) for each in given or () if isinstance(each, Mapping) and _is_tmpfs(each))


def _is_tmpfs(volume: Mapping[str, Any]) -> bool:
    return volume.get("type") == "tmpfs"


def _n_bytes(written: Any) -> float:
    """Return the bytes of a size in a compose file; infinite if it is invalid."""
    match = _SIZE.fullmatch(str(written).strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else math.inf


def _is_own(source: str) -> bool:
    """Return whether the source of a mount is a path below the folder of the compose file."""
    return source.startswith(".") and ".." not in PurePosixPath(source).parts


def _of_harness(text: str) -> bool:
    """Return whether a text names a folder of the harness, such as its logs, which the farm provides itself."""
    return any(mark in text for mark in _HARNESS_MARKS)


def _plain(given: Any) -> str:
    return given if isinstance(given, str) and "${" not in given else ""
