"""The farm's results for the cases that oracles are given, in the form of the oracles' results."""

from __future__ import annotations

import json
import os
import subprocess
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farm.errors import EvaluatorError, FarmError
from farm.records.request import BatchSettings, SandboxSpec
from farm.records.task_needs import unsupported
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_config import EnvironmentTable, HealthcheckTable, StepTable
from farm.tasks.harbor_folder import task_folder
from farm.tasks.harbor_instance import HarborInstance, needs_of
from farm.tasks.ignored_files import IgnoredFiles
from tests.oracles.cases.answer_cases import AnswerCase
from tests.oracles.cases.ignored_cases import FOLDERS
from tests.oracles.cases.terminal_bench_cases import TASK
from workers.evaluators.answers.authors.rules import RULES
from workers.evaluators.answers.authors.sympy_rules import SYMPY_RULES
from workers.evaluators.answers.reference import Reference
from workers.handlers.answer_handler import AnswerInstance
from workers.handlers.harbor.artefact_files import entries
from workers.handlers.harbor.harbor_evaluator import HarborEvaluator
from workers.handlers.harbor.reward_files import gate, rewards_of, total
from workers.handlers.harbor.sandbox_specs import agent_sandbox, verifier_sandbox
from workers.plugins.handler import TaskContext
from workers.policy.recording import RepeatedTurns
from workers.tools.terminal.screen import Screen

VARIABLES = {"TOKEN": "t", "EMPTY": ""}
"""The secrets of a batch, and Harbor's environment."""
_ARCHIVE = Path("/task")
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A memory file system, which writes and removes 1,600 small folders fast; None is the usual place."""


@contextmanager
def written(files: Mapping[str, str | None], rest: Mapping[str, str]) -> Iterator[Path]:
    """Write a task: these files, and those of `rest` that they do not name. None omits one."""
    with TemporaryDirectory(prefix="farm-oracle-", dir=_MEMORY) as place:
        folder = Path(place) / "task"
        for name, text in {**rest, **files}.items():
            if text is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        yield folder


def uploads(folder: Path) -> dict[str, list[str]]:
    """Return the files of each folder of tests and solutions that are uploaded to a sandbox."""
    with task_folder(folder) as task:
        ignored = IgnoredFiles(task.path)
    tops = [place for place in sorted(FOLDERS) if (folder / place).is_dir()]
    return {
        place: sorted(str(path.relative_to(folder / place)) for path in ignored.kept(folder / place) if path.is_file())
        for place in tops
    }


def read(folder: Path) -> dict[str, Any]:
    """Read and plan a task. Raises FarmError if it is refused, with the words `it asks for` for unsupported needs."""
    with task_folder(folder) as task:
        instance = task.instance
        if reasons := unsupported(needs_of(instance), None, "allow"):
            raise FarmError(f"it asks for {'; '.join(reasons)}")
        config, table = instance.task, instance.task.environment
        spec = agent_sandbox(instance, _ARCHIVE, VARIABLES)
        return {
            "name": instance.name if config.task else None,
            "image": _image(spec),
            "place": _place(spec, table),
            "asks": {"os": "linux", "gpus": 0, "tpu": False, "mcp_servers": []},
            "network": instance.network_modes(None)["init"],
            "healthcheck": _check(table.healthcheck),
            "strategy": config.multi_step_reward_strategy,
            "conversation": False,
            "solution_env": expanded(config.solution.env, VARIABLES, whole=True),
            "steps": [_step(instance, step, index) for index, step in enumerate(instance.steps or (None,))],
        }


def _step(instance: HarborInstance, step: StepTable | None, index: int) -> dict[str, Any]:
    config, mode, modes = instance.task, instance.task.mode(step), instance.network_modes(step)
    spec = verifier_sandbox(instance, step, _ARCHIVE, VARIABLES)
    assert ("eval" in spec.network_in) is (modes["eval"] == "public")
    separate = mode == "separate"
    tests = HarborEvaluator(instance, TaskContext(BatchSettings(secrets=VARIABLES))).tests(step, _ARCHIVE, 1e9)
    agent = step.agent if step else config.agent
    verifiers = [config.verifier, *([step.verifier] if step else [])]
    return {
        "instruction": instance.instructions[index],
        "agent": {
            "timeout_sec": agent.timeout_sec if agent.timeout_sec is not None else config.agent.timeout_sec,
            "user": instance.agent_user(step),
            "network": modes["run"],
        },
        "verifier": {
            "mode": mode,
            "image": _image(spec) if separate else "shared",
            "has_its_tests": instance.verifier_image(step) is not None,
            "place": _place(spec, config.verifier_environment(step)) if separate else None,
            "asks": {"os": "linux", "gpus": 0, "tpu": False, "mcp_servers": []} if separate else None,
            "timeout_sec": instance.verifier_s(step),
            "user": instance.verifier_user(step),
            "network": modes["eval"],
            "env": dict(tests.env),
            "collect": [each.model_dump(mode="json") for table in verifiers for each in table.collect],
        },
        "artifacts": [
            {"source": each.source, "exclude": list(each.exclude), "service": each.service or "main"}
            for each in entries(config.artifacts, step.artifacts if step else ())
        ]
        if separate
        else None,
        "min_reward": step.min_reward if step else None,
        "healthcheck": _check(step.healthcheck) if step else None,
        "setup": step is not None and f"steps/{step.name}/workdir/setup.sh" in instance.files,
        "solution": instance.script(step, "solution", "solve.sh") or None,
    }


def _image(spec: SandboxSpec) -> str:
    name = spec.image.removeprefix("docker://")
    return (
        f"docker:{name}"
        if name != spec.image
        else str(Path(spec.image.removeprefix("dockerfile:")).relative_to(_ARCHIVE))
    )


def _place(spec: SandboxSpec, table: EnvironmentTable) -> dict[str, Any]:
    """Return the contents of a sandbox by its spec; `cpus` and `storage_mb` are those of the table."""
    assert (spec.cpus is None) is (table.cpus is None)
    assert table.memory_mb in (None, spec.limits.memory_mb)
    assert table.storage_mb in (None, spec.limits.disk_mb)
    return {
        "cpus": table.cpus,
        "memory_mb": table.memory_mb,
        "storage_mb": table.storage_mb,
        "build_timeout_sec": table.build_timeout_sec,
        "workdir": spec.workdir or None,
        "skills_dir": table.skills_dir,
        "env": spec.env,
    }


def _check(table: HealthcheckTable | None) -> dict[str, Any] | None:
    return None if table is None else table.model_dump(mode="json")


def rewards(files: Mapping[str, str]) -> dict[str, float]:
    """Return the rewards in files by the name. Raises EvaluatorError if there are none."""
    return rewards_of({name: text.encode("latin-1") for name, text in files.items()})


def passes_gate(case: Mapping[str, Any]) -> bool:
    """Return True if a task continues after a step with these rewards."""
    return not gate(StepTable(name="a", min_reward=case["min_reward"]), case["rewards"])


def sums(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the rewards of a task with these of its steps, all of which the policy reached."""
    if any(each is None for each in case["verified"]):
        raise EvaluatorError("a verification without a reward is tried again, or fails")
    return total(case["strategy"], case["verified"], 0)


def task_yaml(folder: Path) -> dict[str, Any]:
    """Return the contents of a task.yaml of terminal-bench 1."""
    with task_folder(folder) as task:
        script = (task.path / "tests" / "test.sh").read_text()
        return {
            "instruction": task.instance.instructions[0],
            "parser": next(line.removeprefix("parser=") for line in script.splitlines() if line.startswith("parser=")),
            "agent_s": task.instance.task.agent.timeout_sec,
            "tests_s": task.instance.task.verifier.timeout_sec,
        }


def converted(folder: Path) -> dict[str, Any]:
    """Convert a task of terminal-bench 1 and read the result. Raises FarmError as `read` does."""
    with task_folder(folder) as task:
        if reasons := unsupported(needs_of(task.instance), None, "allow"):
            raise FarmError(f"it asks for {'; '.join(reasons)}")
        config, solution = task.instance.task, task.path / "solution" / "solve.sh"
        return {
            "instruction": task.instance.instructions[0],
            "agent_s": config.agent.timeout_sec,
            "tests_s": config.verifier.timeout_sec,
            "network": task.instance.network_modes(None)["init"],
            "env": {**config.environment.env, **task.instance.env},
            "workdir": config.environment.workdir,
            "solution": solution.read_text() if solution.exists() else None,
            # Harbor's mapper makes it the test.sh
            "tests": [name for name in _names_below(task.path / "tests") if name != "run-tests.sh"],
            "context": _names_below(task.path / "environment"),
        }


def _names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def resolved(case: Mapping[str, str]) -> bool:
    """Return True if a converted task's test.sh gives 1 for this output. Raises EvaluatorError if it gives none."""
    script = _test_script(case["parser"])
    with TemporaryDirectory(prefix="farm-oracle-") as place:
        printed, logs = Path(place, "printed"), Path(place, "logs")
        logs.mkdir()
        printed.write_bytes(case["text"].encode())
        Path(place, "run-tests.sh").write_text(f"cat {printed}\n")
        script = script.replace("/logs/verifier", str(logs)).replace("/tests/", f"{place}/")
        subprocess.run(["bash", "-c", script], check=False, capture_output=True)
        if not (logs / "reward.txt").exists():
            raise EvaluatorError("the tests wrote no reward")
        return (logs / "reward.txt").read_text().strip() == "1"


@cache
def _test_script(parser: str) -> str:
    text = f"instruction: x\nparser_name: {parser}\n"
    with written({"task.yaml": text}, TASK) as folder, task_folder(folder) as task:
        return (task.path / "tests" / "test.sh").read_text()


def instance_of(case: AnswerCase) -> AnswerInstance:
    """Return the instance of a case, which is that of its row if it has one."""
    if case.row is not None:
        return AnswerInstance.model_validate({"prompt": "How many?", **case.row})
    gold, *others = case.golds
    return AnswerInstance(
        question="How many?",
        gold=gold,
        other_golds=tuple(others),
        options=case.options,
        pattern=case.pattern,
        other_patterns=case.other_patterns,
        prefix=case.prefix,
        rule=case.rule,
    )


def score_by_authors(case: AnswerCase) -> float:
    """Return the score of the farm's own form of a rule."""
    instance = instance_of(case)
    reference = Reference(
        instance.question,
        instance.gold,
        instance.options,
        instance.pattern,
        other_golds=instance.other_golds,
        other_patterns=instance.other_patterns,
        prefix=instance.prefix,
    )
    return RULES[instance.rule](case.response, reference).value


def score_by_sympy(case: AnswerCase) -> float:
    """Return the score of a rule that uses sympy, from the grader's verifier."""
    instance = instance_of(case)
    rule = SYMPY_RULES[instance.rule]
    answer = rule.find(case.response)
    return 0.0 if answer is None else rule.equal(answer, {"gold": instance.gold})


def screen(case: str) -> str:
    """Return a text as a terminal shows it, without tabs and without blanks at the ends of lines."""
    drawn = Screen()
    drawn.feed(case)
    lines = [line.expandtabs().rstrip() for line in drawn.take().split("\n")]
    return unicodedata.normalize("NFC", "\n".join(lines).rstrip("\n"))


def repetition(case: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the turn at which a policy has repeated itself four times, or alternated; 0 if none."""
    repeated = RepeatedTurns(4)
    for number, turn in enumerate(case, start=1):
        calls = [_call(each) for each in turn.get("calls", ())]
        answer = {"role": "assistant", "content": turn.get("said", turn.get("thought", "")), "tool_calls": calls}
        shown = [turn["heard"]] if "heard" in turn else [each["result"] for each in turn["calls"]]
        if repeated.repeat_with(answer, shown):
            return number
    return 0


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {"command": given["command"]} if "command" in given else given["arguments"]
    return {"function": {"name": given.get("name", "bash"), "arguments": json.dumps(arguments)}}
