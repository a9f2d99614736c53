"""mini-swe-agent, unmodified, in real sandboxes without a network: it fixes a real project, and is scored for it.

Installing all its requirements takes longer than most tests: `make test` has only its imports, and runs it once.
"""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from farm.errors import AgentError, EngineError
from farm.records.request import Limits, SamplingParams, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall
from testkit.scratch_folder import sandbox_config
from tests.agents.issue_rollout import FIX, SWE, run_rollout
from tests.conftest import absent
from tests.services.environments import lend_environment
from tests.services.soak import ONLY, SOAK_MINUTES
from workers.agents import mini_swe_agent as mini_swe_agent_module
from workers.agents.harness import Harness, HarnessAgent
from workers.agents.mini_swe_agent import MINI_SWE_AGENT
from workers.handlers.swe import SweHandler
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Completion, Policy, Sandbox
from workers.plugins.registry import agent as registered
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.images.environments import agent_environment
from workers.sandboxes.images.image import image
from workers.testing import ScriptedPolicy, answering, calling
from workers.testing.scripted_model import ScriptedCall, ScriptedTurn

SUBMIT = calling(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done"}), content="Done.")


IMPORTED = (
    "mini-swe-agent litellm openai aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio "
    "attrs certifi charset-normalizer click distro fastuuid frozenlist h11 httpcore httpx idna "
    "importlib-metadata jinja2 jiter lazy-importer markupsafe multidict packaging platformdirs prompt-toolkit "
    "propcache pydantic-core pydantic pygments python-dotenv pyyaml regex requests rich shellingham sniffio "
    "tenacity tiktoken tokenizers tqdm typer typing-extensions typing-inspection urllib3 wcwidth yarl zipp"
)
"""The packages that its command imports: a tenth of the size of all declared requirements."""


@pytest.fixture(autouse=True)
def _namespace_sandboxes() -> None:
    if missing := provider("namespace").missing():
        absent(missing)


def _name(package: str) -> str:
    return package.partition("==")[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def mini_swe_agent() -> Iterator[None]:
    """Install it once, and compile only what several tests import, a tenth, as compiling all takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        # a 0 sets pip's negative options
        patch.setenv("PIP_NO_COMPILE", "0")
        if not SOAK_MINUTES:
            patch.setenv("PIP_NO_DEPS", "1")
            packages = tuple(each for each in MINI_SWE_AGENT.packages if _name(each) in IMPORTED.split())
            assert len(packages) == len(IMPORTED.split())
            patch.setattr(mini_swe_agent_module, "MINI_SWE_AGENT", replace(MINI_SWE_AGENT, packages=packages))
        agent = mini_swe_agent_module.MINI_SWE_AGENT
        lend_environment(agent.packages)
        ((folder, _), *_) = agent_environment(sandbox_config(), agent.packages, image(sandbox_config(), "host")).binds
        # the instance's requirements are installed with their dependencies
        patch.delenv("PIP_NO_DEPS", raising=False)
        if SOAK_MINUTES:
            assert not callable(agent.environment)
            env = {**os.environ, **agent.environment}
            subprocess.run([f"{folder}/bin/python", "-c", "import litellm, minisweagent.run.mini"], env=env, check=True)
        yield


class _Records:
    """Recorded calls and artefacts of a rollout."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.kept: dict[str, bytes] = {}

    async def __call__(self, call: ModelCall) -> None:
        self.calls.append(copy.deepcopy(call))

    async def keep(self, index: int, artefact: Artefact) -> str:
        self.kept[artefact.name] = artefact.data
        return artefact.name


@asynccontextmanager
async def started(spec: SandboxSpec, kind: str = "namespace") -> AsyncIterator[Sandbox]:
    sandbox = await provider(kind).start(f"test-{uuid.uuid4().hex[:12]}", spec)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def context_of(
    sandbox: Sandbox, policy: Policy, records: _Records, messages: list[Message], **limits: Any
) -> AgentContext:
    return AgentContext(
        rollout_id="r1",
        messages=messages,
        tools={},
        policy=policy,
        sampling=SamplingParams(),
        limits=Limits(**limits),
        record=records,
        keep=records.keep,
        sandbox=sandbox,
    )


async def run_and_score(policy: Policy, records: _Records, **limits: Any) -> tuple[AgentResult, float]:
    """Play the issue by mini-swe-agent and score what it leaves."""
    handler, agent = SweHandler(SWE), registered("mini-swe-agent")
    assert isinstance(agent, HarnessAgent)
    async with started(agent.sandbox(SWE.spec())) as sandbox:
        await handler.prepare(sandbox)
        result = await agent.run(context_of(sandbox, policy, records, handler.messages(), **limits))
        submission = await handler.collect(sandbox, result.answer)
    score = await handler.evaluator().evaluate(submission, lambda *_, **__: started(SWE.spec()), 300.0)
    return result, score.value


@ONLY
@pytest.mark.usefixtures("mini_swe_agent")
def test_mini_swe_agent_fixes_an_issue() -> None:
    records = _Records()
    turns = [
        calling(("bash", {"command": "which python; git status --short; ls"}), content="I look."),
        calling(("bash", {"command": FIX}), content="I see the fault."),
        SUBMIT,
    ]
    result, value = asyncio.run(run_and_score(ScriptedPolicy(*turns), records))
    assert result == AgentResult(Outcome.SUBMITTED, "done\n")
    assert value == 1.0
    assert [call.index for call in records.calls] == [0, 1, 2]
    first, second, third = records.calls
    assert SWE.problem_statement in first.messages[-1]["content"]
    assert [message["role"] for message in second.messages + third.messages] == ["tool", "tool"], "only what is new"
    seen = second.messages[0]["content"]
    assert "/opt/farm" not in seen, "the instance's own Python is the one on PATH"
    assert second.response == turns[1].response


@pytest.mark.usefixtures("mini_swe_agent")
def test_tokens_are_those_sampled_by_the_engine() -> None:
    """Run all three stages as a worker does, on the scripted engine's token wire, through gateway and relay."""
    calls = ("which python; git status --short; ls", FIX, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done")
    turns = tuple(ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": each}),)) for each in calls)
    trial = run_rollout("mini-swe-agent", "namespace", turns)
    assert (trial.outcome, trial.reward) == (Outcome.SUBMITTED, 1.0)
    assert len(trial.rows) == 1, trial.breaks
    assert [call.mismatch for call in trial.calls] == [None] * 3
    assert set(trial.rows[0].policy_versions.tolist()) == {-1, 3}


@ONLY
@pytest.mark.usefixtures("mini_swe_agent")
def test_work_before_the_turn_limit_is_scored() -> None:
    records = _Records()
    turns = [calling(("bash", {"command": FIX}), content="I see the fault.")] * 3
    result, value = asyncio.run(run_and_score(ScriptedPolicy(*turns), records, max_turns=1))
    assert result.outcome is Outcome.MAX_TURNS
    assert value == 1.0
    assert len(records.calls) == 1


@ONLY
@pytest.mark.usefixtures("mini_swe_agent")
def test_answers_without_a_tool_call_are_invalid_actions() -> None:
    result, value = asyncio.run(run_and_score(ScriptedPolicy(*[answering("Let me think.")] * 3), _Records()))
    assert (result.outcome, value) == (Outcome.INVALID_ACTION, 0.0)


@pytest.mark.parametrize("kind", ["namespace", "singularity"])
def test_agent_packages_are_kept_apart_from_instance_packages(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "singularity":
        request.getfixturevalue("apptainer")
    if missing := provider(kind).missing():
        absent(missing)
    version = "import iniconfig, importlib.metadata as m; print(m.version('iniconfig'))"

    async def main() -> list[str]:
        spec = SandboxSpec(packages=("iniconfig==2.1.0",), agent_packages=("iniconfig==2.0.0", "wheel==0.45.1"))
        texts = []
        async with started(spec, kind) as sandbox:
            for command in (
                ["python3", "-c", version],
                ["/opt/farm/agent/bin/python", "-I", "-c", version],
                ["/opt/farm/agent/bin/wheel", "version"],
                ["bash", "-c", "type -p wheel; touch /opt/farm/agent/x 2>&1 || echo $PATH"],
            ):
                result = await sandbox.exec(command, timeout_s=60)
                texts.append((result.stdout + result.stderr).decode())
        return texts

    instances, agents, script, rest = asyncio.run(main())
    assert (instances, agents) == ("2.1.0\n", "2.0.0\n")
    assert script.startswith("wheel 0.45.1"), "a script finds its interpreter"
    *value, touched, path = rest.splitlines()
    assert "Read-only" in touched
    assert not any("/opt/farm" in line for line in (*value, path)), "programs are looked for elsewhere"


def test_program_without_packages_uses_the_python_of_the_sandbox() -> None:
    code = """
import http.client, json, os, urllib.parse
url = urllib.parse.urlsplit(os.environ["ANTHROPIC_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
connection.request("POST", url.path + "/v1/messages", json.dumps(body))
print(json.loads(connection.getresponse().read())["content"][0]["text"])
"""
    harness = Harness(name="little", command=lambda task: ["python3", "-c", code])

    async def main(*script: Completion | Exception) -> AgentResult:
        async with started(SandboxSpec()) as sandbox:
            result = [{"role": "user", "content": "greet"}]
            return await HarnessAgent(harness).run(context_of(sandbox, ScriptedPolicy(*script), _Records(), result))

    assert asyncio.run(main(answering("good day"))) == AgentResult(Outcome.ANSWERED, "good day")
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(main(EngineError("gone")))


def short_program_agent(program: str, **more: Any) -> Harness:
    """Return an agent that is a short program: it makes one call, and then the policy decides."""
    ask = """
import http.client, json, os, signal, socket, subprocess, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def ask(text):
    connection = http.client.HTTPConnection(url.netloc)
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body))
    return connection.getresponse().status
ask("first")
"""
    return Harness(name="little", command=lambda task: ["python3", "-c", ask + program], **more)


def run_harness(
    harness: Harness, records: _Records, *, n_answers: int = 1, env: dict[str, str] | None = None
) -> AgentResult:
    async def main() -> AgentResult:
        async with started(SandboxSpec(env=env or {})) as sandbox:
            result = [{"role": "user", "content": "do"}]
            policy = ScriptedPolicy(*[answering("yes")] * n_answers)
            async with asyncio.timeout(60):
                return await HarnessAgent(harness).run(context_of(sandbox, policy, records, result))

    return asyncio.run(main())


@pytest.mark.parametrize(
    "left",
    [
        "ln -s /dev/zero out",
        "ln -s out out",
        "ln -s /run/farm/gateway.sock out",
        "mkfifo out",
        "mkdir out",
        "truncate -s 900G out; truncate -s 3G out",
        "printf '\\377\\376' > out",
        "head -c 1000000 /dev/zero | tr '\\0' '[' > out",
    ],
)
def test_invalid_output_file_is_an_agent_error(left: str) -> None:
    harness = short_program_agent(f"subprocess.run({left!r}, shell=True)", output="out", read=MINI_SWE_AGENT.read)
    with pytest.raises(AgentError, match="did not leave a valid output"):
        run_harness(harness, _Records())


def test_calls_by_programs_of_the_policy_are_recorded() -> None:
    """They find the key in the environment that they inherit from the agent."""
    records = _Records()
    own = "subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"OPENAI_API_KEY\"])'], check=True)"
    result = run_harness(short_program_agent(f"{own}; ask('second'); ask('third')"), records, n_answers=3)
    assert result.answer
    assert len(result.answer) >= 32
    assert [call.messages[0]["content"] for call in records.calls] == ["first", "second", "third"]


def test_forged_gateway_socket_samples_nothing() -> None:
    records = _Records()
    fake = """
os.unlink("/run/farm/gateway.sock")
server = socket.socket(socket.AF_UNIX)
server.bind("/run/farm/gateway.sock")
server.listen()
if os.fork() == 0:
    while True:
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
print(ask("second"))
"""
    assert run_harness(short_program_agent(fake), records) == AgentResult(Outcome.ANSWERED, "200")
    assert [call.messages[0]["content"] for call in records.calls] == ["first"]


def test_killed_relay_is_an_agent_error() -> None:
    with pytest.raises(AgentError, match=r"ended with code (137|-9)"):
        run_harness(short_program_agent("os.kill(os.getppid(), signal.SIGKILL); signal.pause()"), _Records())


def test_hundreds_of_connections_do_not_block_the_agent() -> None:
    flood = """
opened = []
for number in range(600):
    opened.append(socket.socket(socket.AF_UNIX))
    opened[-1].connect("/run/farm/gateway.sock")
for each in opened:
    each.close()
while True:
    try:
        print(ask("second"))
        break
    except OSError:
        # not all are seen to be closed yet
        pass
"""
    assert run_harness(short_program_agent(flood), _Records(), n_answers=2) == AgentResult(Outcome.ANSWERED, "200")


def test_image_without_python_is_named_in_the_error() -> None:
    with pytest.raises(AgentError, match="without a python3, which its image lacks: a Harness with `packages`"):
        run_harness(short_program_agent(""), _Records(), env={"PATH": "/nowhere"})


def test_image_that_cannot_start_agent_python_is_named_in_the_error() -> None:
    with pytest.raises(AgentError, match="a Python that does not start in its image"):
        # the sandbox was not made for this agent
        run_harness(short_program_agent("", packages=("iniconfig==2.0.0",)), _Records())
