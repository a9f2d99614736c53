"""Placeholders in arguments, files and variables of a black-box agent, and its steps before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farm.errors import AgentError, AgentMissing
from farm.records.request import SandboxSpec
from farm.records.rollout import Outcome
from farm.records.sandbox_spec import AgentProgram
from tests.unit.workers.agents.test_harness import ASK, run_program
from workers.agents.harness import Harness, HarnessAgent, Task
from workers.plugins.interfaces import AgentResult
from workers.testing import answering

SHOW = "ask('x'); print(json.dumps([sys.argv[1:], os.environ['HERE'], open('c.toml').read()]))"


def settings_of_program(command_word: str = "", **more: Any) -> Any:
    """The argument, variable and file of a program, each of which uses the gateway's address."""
    result = run_program(
        "",
        answering("yes"),
        command=lambda task: [
            "python3",
            "-c",
            ASK + SHOW,
            f"--url={task.base_url}/v1",
            task.key,
            task.model,
            command_word,
        ],
        environment=lambda task: {"HERE": f"{task.base_url}/x"},
        files=lambda task: {"task.txt": task.text, "c.toml": f'url = "{task.base_url}/v1"\nkey = "{task.key}"\n'},
        **more,
    )
    assert result.answer
    return json.loads(result.answer)


def test_arguments_variables_and_files_contain_the_address() -> None:
    (url, key, model, _), here, config = settings_of_program()
    base = here.removesuffix("/x")
    assert url == f"--url={base}/v1"
    assert base.startswith("http://127.0.0.1:")
    assert base.endswith(f"/t/{key}")
    assert config == f'url = "{base}/v1"\nkey = "{key}"\n'
    assert model == "policy"


@pytest.mark.parametrize("text", ["{base_url} ${base_url} %s", "http://farm-gateway-0123456789abcdef", "{{key}}"])
def test_task_that_looks_like_a_placeholder_is_unchanged(text: str) -> None:
    (*_, word), _, _ = settings_of_program(text)
    assert word == text


def test_steps_run_before_and_after_in_order() -> None:
    def note(what: str) -> list[str]:
        return ["sh", "-c", f"echo {what} $WHO >>steps.txt"]

    result = run_program(
        "ask('x'); print('not this', file=open('steps.txt', 'a'))",
        answering("yes"),
        environment={"WHO": "agent"},
        prepare=lambda task: [note("one"), note("two")],
        collect=lambda task: [note("three"), ["sh", "-c", "cp steps.txt answer.txt"]],
        output="answer.txt",
    )
    assert result == AgentResult(Outcome.ANSWERED, "one agent\ntwo agent\nnot this\nthree agent")


@pytest.mark.parametrize("which", ["prepare", "collect"])
def test_failed_step_is_an_error_with_its_output(which: str) -> None:
    failing: dict[str, Any] = {which: lambda task: [["sh", "-c", "echo no such tool >&2; exit 3"]]}
    with pytest.raises(AgentError, match=rf"agent little: {which}: sh ended with code 3: no such tool"):
        run_program("ask('x')", answering("yes"), **failing)


@pytest.mark.parametrize(
    ("which", "given"),
    [
        ("prepare", lambda task: [["sh", "-c", f"echo {task.base_url}/v1 >url.txt"]]),
        ("collect", lambda task: [["true"], ["echo", task.base_url]]),
        ("stdin", lambda task: json.dumps({"base": task.base_url})),
    ],
)
def test_address_in_an_unsupported_place_is_refused(which: str, given: Any) -> None:
    with pytest.raises(AgentMissing, match=f"agent little: {which} uses the gateway's address.*in command"):
        run_program("ask('x')", answering("yes"), **{which: given})


def test_rollout_ended_by_a_limit_runs_no_steps_after() -> None:
    result = run_program(
        "ask('x'); ask('y')", answering("yes"), limits={"max_turns": 1}, collect=lambda task: [["false"]], output="none"
    )
    assert result == AgentResult(Outcome.MAX_TURNS)


def test_long_task_is_passed_by_standard_input() -> None:
    long = "x" * 300_000
    result = run_program("ask('x'); print(len(sys.stdin.read()))", answering("yes"), stdin=lambda task: long)
    assert result.answer == "300000"


def test_programs_are_requested_with_the_packages(tmp_path: Path) -> None:
    brought = AgentProgram(name="tool", kind="folder", source=str(tmp_path))
    agent = HarnessAgent(
        Harness(name="a", command=lambda task: [], packages=("x==1",), programs=(brought,), python="3.12")
    )
    spec = agent.sandbox(SandboxSpec(image="some.sif", packages=("y==2",)))
    assert (spec.agent_packages, spec.agent_programs, spec.agent_python) == (("x==1",), (brought,), "3.12")
    assert (spec.image, spec.packages) == ("some.sif", ("y==2",))


@pytest.mark.parametrize(
    "packages",
    ["requests", "requests>=2", "requests==2 --index-url x", "wheel.whl", "/x/y.tar.gz", "/x/a.whl#sha256=12", "-e ."],
)
def test_packages_without_exact_versions_are_refused(packages: str) -> None:
    agent = HarnessAgent(Harness(name="a", command=lambda task: [], packages=(packages,)))
    with pytest.raises(AgentError, match=r"agent a: agent_packages\.0") as raised:
        agent.sandbox(None)
    assert not raised.value.retryable


@pytest.mark.parametrize(
    "packages", ["requests==2.1", "pydantic-ai-slim[openai]==2.68.0", "/x/a.whl", f"/x/a.whl#sha256={'0' * 64}"]
)
def test_packages_with_exact_versions_are_accepted(packages: str) -> None:
    assert HarnessAgent(Harness(name="a", command=lambda task: [], packages=(packages,))).sandbox(None).agent_packages


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "npm", "name": "agent", "source": "/l.json"}, "use another name"),
        ({"kind": "npm", "name": "../x", "source": "/l.json"}, "pattern"),
        ({"kind": "folder", "name": "x", "source": "relative"}, "absolute path"),
        ({"kind": "archive", "name": "x", "source": "https://example.org/x.tgz"}, "needs the sha256"),
        ({"kind": "archive", "name": "x", "source": "/x.tgz", "digest": "1234"}, "pattern"),
        ({"kind": "image", "name": "x", "source": "docker://example.org/x:1"}, "by @sha256:"),
        ({"kind": "git", "name": "x", "source": "/x"}, "npm"),
    ],
)
def test_invalid_program_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AgentProgram.model_validate(fields)


@pytest.mark.parametrize(
    "fields", [{"source": f"docker://x@sha256:{'0' * 64}"}, {"source": "docker://x:1", "digest": "0" * 24}]
)
def test_registry_image_is_pinned_by_its_digest(fields: dict[str, str]) -> None:
    assert AgentProgram.model_validate({"kind": "image", "name": "x", **fields}).source == fields["source"]


def test_task_lists_its_fields() -> None:
    assert set(Task.__slots__) == {
        *("text", "limits", "base_url", "key", "model"),
        *("max_output_tokens", "context_tokens"),
    }
