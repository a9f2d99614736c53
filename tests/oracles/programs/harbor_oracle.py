"""Results of Harbor's own code, run in its own environment: `harbor_oracle.py QUESTION < CASES > ANSWERS`, both JSON.

`tasks`: folders, each `{"folder": PATH}`, or `{"files": {PATH: TEXT}}` that are written first, are read and planned by
Harbor; none is run. `uploads`: the tests and solutions of a folder that it would upload to a sandbox. `rewards`: files
left by tests, `{"reward.json": TEXT}`, are read by its verifier. `gates` and `totals`: the results of rewards in its
trials of several steps. `conversions`: tasks of terminal-bench 1, by its mapper.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from harbor.agents.oracle import OracleAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.mappers.terminal_bench import TerminalBenchMapper
from harbor.models.task.artifacts import convention_source_for_os, with_convention_entry
from harbor.models.task.config import EnvironmentConfig, HealthcheckConfig, StepConfig, TaskConfig
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import (
    VerifierEnvironmentMode,
    resolve_step_verifier_mode,
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.models.verifier.result import VerifierResult
from harbor.trial.multi_step import MultiStepTrial
from harbor.trial.network_policy import resolve_trial_network_plan
from harbor.trial.trial import Trial
from harbor.utils.env import resolve_env_vars
from harbor.verifier.verifier import Verifier


class NoSandbox(BaseEnvironment):
    """Has the checks of every environment and runs nothing: the files that its verifier downloads exist."""

    @staticmethod
    def type() -> str:
        return "none"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(**dict.fromkeys(EnvironmentCapabilities.model_fields, True))

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None: ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None: ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None: ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        for name, data in self.left.items():
            (Path(target_dir) / name).write_bytes(data)

    async def exec(self, command: str, **how: Any) -> ExecResult:
        return ExecResult(return_code=0)


@contextmanager
def written(files: dict[str, str | None]) -> Iterator[Path]:
    with TemporaryDirectory(prefix="harbor-oracle-") as place:
        folder = Path(place) / "task"
        for name, text in files.items():
            if text is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        yield folder


def environment_of(folder: Path, config: EnvironmentConfig, trial: Path) -> NoSandbox:
    """Make the environment as a trial would, with all refusals of its constructor."""
    return NoSandbox(folder, "task", "session", TrialPaths(trial), config.model_copy(deep=True))


def plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def check_of(table: HealthcheckConfig | None) -> Any:
    return None if table is None else plain(table)


def resources(config: EnvironmentConfig) -> dict[str, Any]:
    names = ("cpus", "memory_mb", "storage_mb", "build_timeout_sec", "skills_dir")
    values = {name: plain(getattr(config, name)) for name in names}
    # no command is started in a folder without a name
    return {**values, "workdir": config.workdir or None, "env": resolve_env_vars(config.env)}


def requirements(config: EnvironmentConfig) -> dict[str, Any]:
    return {
        "os": config.os.value,
        "gpus": max(config.gpus or 0, 0),
        "tpu": bool(config.tpu),
        "mcp_servers": sorted(server.name for server in config.mcp_servers),
    }


def step_of(task: Task, step: StepConfig | None, index: int, trial: Path) -> dict[str, Any]:
    config, paths = task.config, task.paths
    mode = resolve_step_verifier_mode(config, step) if step else resolve_task_verifier_mode(config)
    settings = TrialConfig(task={"path": task.task_dir})
    plan = resolve_trial_network_plan(
        config, settings.agent, settings.environment, settings.verifier, step, verifier_mode=mode
    )
    runner = SimpleNamespace(task=task, config=settings, _resolve_timeout_sec=lambda base_sec, **_: base_sec)
    definition = resolve_verifier_environment_definition(config, paths, step)
    if definition is None:
        image, bundled, place, needs = "shared", False, None, None
    else:
        folder = definition.directory
        environment_of(folder, definition.config, trial)
        image = definition.config.docker_image and f"docker:{definition.config.docker_image}"
        image = image or str(folder.relative_to(task.task_dir))
        bundled, place, needs = definition.bundled_tests, resources(definition.config), requirements(definition.config)
    oracle = SimpleNamespace(_task=task, _step_index=index)
    try:
        _, solution = OracleAgent._resolve_solution_paths(oracle)
        solve = str(solution.relative_to(task.task_dir)) if solution.exists() else None
    except FileNotFoundError:
        solve = None
    tables = [config.verifier, *([step.verifier] if step else [])]
    entries = [*config.artifacts, *(step.artifacts if step else [])]
    return {
        "instruction": task.step_instruction(step.name) if step else task.instruction,
        "agent": {
            "timeout_sec": MultiStepTrial._step_agent_timeout_sec(runner, step)
            if step
            else Trial._compute_agent_timeout_sec(runner),
            "user": MultiStepTrial._step_agent_user(runner, step) if step else config.agent.user,
            "network": plan.agent_phase.network_mode.value,
        },
        "verifier": {
            "mode": mode.value,
            "image": image,
            "has_its_tests": bundled,
            "place": place,
            "asks": needs,
            "timeout_sec": Trial._step_verifier_timeout_sec(runner, step)
            if step
            else Trial._compute_verifier_timeout_sec(runner),
            "user": Trial._step_verifier_user(runner, step) if step else config.verifier.user,
            "network": plan.verifier_phase.network_mode.value,
            "env": resolve_env_vars({key: value for table in tables for key, value in table.env.items()}),
            "collect": [plain(hook) for table in tables for hook in table.collect],
        },
        "artifacts": [
            {"source": each.source, "exclude": each.exclude, "service": each.service or "main"}
            for each in with_convention_entry(
                entries, convention_source=convention_source_for_os(config.environment.os)
            )
        ]
        if mode is VerifierEnvironmentMode.SEPARATE
        else None,
        "min_reward": step.min_reward if step else None,
        "healthcheck": check_of(step.healthcheck) if step else None,
        "setup": bool(step) and paths.step_setup_path(step.name).exists(),
        "solution": solve,
    }


def read(folder: Path) -> dict[str, Any]:
    """Read and plan a task, as a trial does before it starts anything."""
    if not Task.is_valid_dir(folder):
        Task(folder)
        raise ValueError("Task.is_valid_dir refuses it")
    task = Task(folder)
    config = task.config
    with TemporaryDirectory(prefix="harbor-trial-") as trial:
        environment_of(task.paths.environment_dir, config.environment, Path(trial))
        image = config.environment.docker_image
        settings = TrialConfig(task={"path": folder})
        mode = resolve_task_verifier_mode(config)
        plan = resolve_trial_network_plan(
            config, settings.agent, settings.environment, settings.verifier, None, verifier_mode=mode
        )
        steps = config.steps or [None]
        return {
            "name": task.name if config.task else None,
            "image": f"docker:{image}" if image else "environment",
            "place": resources(config.environment),
            "asks": requirements(config.environment),
            "network": plan.agent_env_baseline.network_mode.value,
            "healthcheck": check_of(config.environment.healthcheck),
            "strategy": config.multi_step_reward_strategy.value if config.multi_step_reward_strategy else None,
            "conversation": task.paths.trajectory_path.is_file(),
            "solution_env": resolve_env_vars(config.solution.env),
            "steps": [step_of(task, step, index, Path(trial)) for index, step in enumerate(steps)],
        }


def tasks(case: dict[str, Any]) -> Any:
    if "folder" in case:
        return read(Path(case["folder"]))
    with written(case["files"]) as folder:
        return read(folder)


def uploads(case: dict[str, Any]) -> Any:
    """Return the files of each folder of tests and solutions that a trial would upload."""
    with written(case["files"]) as folder:
        task = Task(folder)
        places = [folder, *(folder / "steps" / step.name for step in task.config.steps or [])]
        tops = [place / name for place in places for name in ("tests", "solution") if (place / name).is_dir()]
        return {
            str(top.relative_to(folder)): sorted(
                str(name) for name in task.file_filter.select(top).relative_paths if (top / name).is_file()
            )
            for top in tops
        }


def rewards(case: dict[str, str]) -> Any:
    """Verify, with files of rewards that exist once the tests have run."""
    files = {"task.toml": "", "instruction.md": "x", "environment/Dockerfile": "", "tests/test.sh": "true"}
    with written(files) as folder, TemporaryDirectory(prefix="harbor-trial-") as place:
        task, trial = Task(folder), TrialPaths(Path(place))
        trial.verifier_dir.mkdir(parents=True)
        environment = environment_of(folder / "environment", task.config.environment, Path(place))
        environment.left = {name: text.encode("latin-1") for name, text in case.items()}
        result: VerifierResult = asyncio.run(Verifier(task, trial, environment).verify())
        assert result.rewards is not None
        return {name: float(value) for name, value in result.rewards.items()}


def gates(case: dict[str, Any]) -> Any:
    return MultiStepTrial._min_reward_failure(case["rewards"], case["min_reward"]) is None


def totals(case: dict[str, Any]) -> Any:
    results = [
        SimpleNamespace(verifier_result=None if each is None else VerifierResult(rewards=each))
        for each in case["verified"]
    ]
    config = TaskConfig.model_validate({"multi_step_reward_strategy": case["strategy"]})
    runner = SimpleNamespace(task=SimpleNamespace(config=config), result=SimpleNamespace(step_results=results))
    runner._aggregate_step_rewards = lambda: Trial._aggregate_step_rewards(runner)
    total = Trial._select_multi_step_reward(runner)
    return {} if total is None else total.rewards


def conversions(case: dict[str, Any]) -> Any:
    """Convert a task of terminal-bench 1 by Harbor's mapper; return the result, and the additions to the Dockerfile."""
    with written(case["files"]) as source:
        target = source.parent / "mapped"
        with contextlib.redirect_stdout(io.StringIO()):
            result = TerminalBenchMapper().map(source.parent, target)
        if result.failed:
            raise ValueError(result.failed[0][1])
        folder = target / "task"
        reading = read(folder)
        dockerfile = (folder / "environment" / "Dockerfile").read_text()
        added = dockerfile.partition("# Mapped from docker-compose.yaml\n")[2].splitlines()
        env = dict(line.removeprefix("ENV ").partition("=")[::2] for line in added if line.startswith("ENV "))
        workdirs = [line.removeprefix("WORKDIR ") for line in added if line.startswith("WORKDIR ")]
        return {
            "instruction": reading["steps"][0]["instruction"].rstrip("\n"),
            "agent_s": reading["steps"][0]["agent"]["timeout_sec"],
            "tests_s": reading["steps"][0]["verifier"]["timeout_sec"],
            "network": reading["network"],
            "env": env,
            "workdir": workdirs[-1] if workdirs else None,
            "solution": (folder / "solution" / "solve.sh").read_text() if reading["steps"][0]["solution"] else None,
            "tests": names_below(folder / "tests"),
            "context": [name for name in names_below(folder / "environment") if name != "docker-compose.yaml"],
        }


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


QUESTIONS = {
    "conversions": conversions,
    "tasks": tasks,
    "uploads": uploads,
    "rewards": rewards,
    "gates": gates,
    "totals": totals,
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answer = QUESTIONS[sys.argv[1]]
    given = json.load(sys.stdin)
    os.environ.update(given["variables"])
    answers = {}
    for name, case in given["cases"].items():
        try:
            answers[name] = {"value": answer(case)}
        except Exception as error:
            answers[name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
