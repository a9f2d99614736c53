"""The container files are well formed: pinned, without secrets, with health checks, and with commands that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from farm.cli.main import COMMANDS
from farm.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
PINNED = re.compile(r"[a-z0-9][a-z0-9./_-]*:\d+\.\d+[\w.-]*")
DURATION = re.compile(r"\d+(ms|s|m|h)")
SERVICE_KEYS = {
    "build", "command", "depends_on", "devices", "environment", "healthcheck", "image", "init", "ports", "restart",
    "security_opt", "stop_grace_period", "volumes",
}  # fmt: skip
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip

Compose = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> Compose:
    loaded: Compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: Compose) -> Compose:
    result: Compose = compose["services"]
    return result


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile with its arguments, continued lines joined."""
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    pairs = [line.partition(" ") for line in joined if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in pairs]


def test_compose_has_only_known_keys(compose: Compose, services: Compose) -> None:
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "volumes"}
    unknown = {name: set(service) - SERVICE_KEYS for name, service in services.items()}
    assert not any(unknown.values()), unknown


def test_compose_images_are_pinned(services: Compose) -> None:
    for name, service in services.items():
        assert PINNED.fullmatch(service["image"]), f"{name}: {service['image']}"


def test_compose_has_the_store_and_broker_versions_of_the_tests(services: Compose) -> None:
    assert services["postgres"]["image"].startswith("postgres:16.")
    assert services["redis"]["image"].startswith("redis:7.")


def test_compose_commands_are_subcommands_of_farm(services: Compose) -> None:
    ours = {name: service for name, service in services.items() if service["image"].startswith("rollout-farm:")}
    assert {"node", "migrate", "flower"} <= set(ours)
    for name, service in ours.items():
        assert service["command"][0] in COMMANDS, name


def test_long_running_service_has_a_health_check(services: Compose) -> None:
    for name, service in services.items():
        if service["restart"] == "no":
            continue
        check = service["healthcheck"]
        assert set(check) <= {"test", "interval", "timeout", "retries", "start_period"}, name
        assert check["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert len(check["test"]) > 1, name
        assert isinstance(check["retries"], int), name
        assert all(DURATION.fullmatch(check[key]) for key in set(check) - {"test", "retries"}), name


def test_service_waits_only_for_services_that_report_readiness(services: Compose) -> None:
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            wanted = "restart" if how["condition"] == "service_completed_successfully" else "healthcheck"
            assert how["condition"] in {"service_healthy", "service_completed_successfully"}, name
            assert wanted in services[other], f"{name} waits for {other}"


def test_compose_mounts_declared_volumes_only(compose: Compose, services: Compose) -> None:
    mounted = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert mounted == set(compose["volumes"])


def test_compose_opens_ports_on_this_machine_only(services: Compose) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports), ports


def test_secrets_come_from_the_environment_file(services: Compose) -> None:
    listed = {line.split("=")[0] for line in _settings_of(FOLDER / "env.example")}
    text = (FOLDER / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used == listed, "env.example lists what compose.yaml reads"
    for name, service in services.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|KEY", key):
                assert str(value).startswith("${"), f"{name}: {key}"
    assert not re.search(r"//\w+:[^$@\s]+@", text), "a URL carries its password"
    assert ".env" in (FOLDER / ".gitignore").read_text().splitlines()


def test_example_environment_file_holds_no_values() -> None:
    assert all(line.endswith("=") for line in _settings_of(FOLDER / "env.example"))


def test_farm_settings_in_the_container_files_exist(services: Compose, instructions: list[tuple[str, str]]) -> None:
    known = {f"FARM_{name.upper()}" for name in Settings.model_fields}
    named = {key for service in services.values() for key in service.get("environment", {})}
    named |= {part.partition("=")[0] for name, text in instructions if name == "ENV" for part in shlex.split(text)}
    assert {name for name in named if name.startswith("FARM_")} <= known


def test_dockerfile_has_only_known_instructions(instructions: list[tuple[str, str]]) -> None:
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    assert all(arguments for _, arguments in instructions)
    for name, arguments in instructions:
        if name in {"ENTRYPOINT", "CMD", "VOLUME"}:
            assert isinstance(json.loads(arguments), list), "the exec form: signals must reach the farm"


def test_dockerfile_stages_start_from_pinned_images(instructions: list[tuple[str, str]]) -> None:
    stages = [arguments.split() for name, arguments in instructions if name == "FROM"]
    assert len(stages) > 1
    for image, word, stage in stages:
        assert PINNED.fullmatch(image), image
        assert word == "AS"
        assert stage


def test_dockerfile_ends_as_an_ordinary_user(instructions: list[tuple[str, str]]) -> None:
    users = [arguments for name, arguments in instructions if name == "USER"]
    assert users
    assert users[-1] not in {"root", "0"}
    assert instructions[-3][0] == "USER", "instructions after USER only set the command"


def test_dockerfile_copies_what_exists(instructions: list[tuple[str, str]]) -> None:
    stages = {arguments.split()[2] for name, arguments in instructions if name == "FROM"}
    kept = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    for name, arguments in instructions:
        if name != "COPY":
            continue
        *sources, _ = [part for part in arguments.split() if not part.startswith("--")]
        origin = re.search(r"--from=(\S+)", arguments)
        if origin:
            assert origin[1] in stages, arguments
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in kept, f"{source} does not reach the build"


def test_dockerfile_installs_by_hash(instructions: list[tuple[str, str]]) -> None:
    runs = [arguments for name, arguments in instructions if name == "RUN"]
    assert any("--require-hashes" in run and "requirements-runtime.lock" in run for run in runs)


def test_dockerfile_installs_no_package_that_only_tests_need(instructions: list[tuple[str, str]]) -> None:
    copied = {source for name, arguments in instructions if name == "COPY" for source in arguments.split()}
    assert {path for path in copied if path.endswith(".lock")} == {"requirements-runtime.lock"}
    runtime, everything = (_pinned(ROOT / name) for name in ("requirements-runtime.lock", "requirements.lock"))
    assert runtime.items() < everything.items()
    assert not {"pytest", "hypothesis", "mypy", "ruff"} & runtime.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    assert {_name(requirement) for requirement in needed} <= runtime.keys(), "it is installed without an index"


def _pinned(lock: Path) -> dict[str, str]:
    """Return the packages of a lock and their versions."""
    lines = (line.split(" ")[0].partition("==") for line in lock.read_text().splitlines() if re.match(r"\w", line))
    return {_name(name): version for name, _, version in lines}


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return re.sub(r"[._-]+", "-", match[0]).lower()


def _settings_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
