"""Black-box agents as small programs in a folder of this machine: the outcome of each end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from farm.errors import AgentError, EngineError, LimitReached, SandboxError, StaleRollout
from farm.records.request import Limits, SamplingParams, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.trajectory import ModelCall
from workers.agents.harness import Harness, HarnessAgent, Task
from workers.agents.mini_swe_agent import MINI_SWE_AGENT, mini_swe_agent
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Completion, Sandbox
from workers.testing import FakeSandbox, ScriptedPolicy, answering
from workers.testing.local_sandbox import LocalProvider

ASK = """
import http.client, json, os, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def ask(text, *later):
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    messages = [{"role": "user", "content": text}]
    messages += [{"role": ("assistant", "user")[n % 2], "content": each} for n, each in enumerate(later)]
    body = json.dumps({"model": "m", "messages": messages})
    connection.request("POST", url.path + "/chat/completions", body)
    response = connection.getresponse()
    data = json.loads(response.read())
    return data["choices"][0]["message"]["content"] if response.status == 200 else response.status
task = open("task.txt").read()
"""


@dataclass
class _Records:
    """Recorded calls and artefacts of a rollout."""

    calls: list[ModelCall] = field(default_factory=list)
    kept: dict[str, Artefact] = field(default_factory=dict)

    async def __call__(self, call: ModelCall) -> None:
        self.calls.append(call)

    async def keep(self, index: int, artefact: Artefact) -> str:
        self.kept[artefact.name] = artefact
        return artefact.name


def _files(task: Task) -> Mapping[str, str]:
    return {"task.txt": task.text}


def harness(program: str, **more: Any) -> Harness:
    """An agent that is a Python program."""
    command = ["python3", "-c", ASK + program]
    return Harness(**{"name": "little", "command": lambda task: command, "files": _files, **more})


def context_of(sandbox: Sandbox | None, policy: Any, records: _Records, **limits: Any) -> AgentContext:
    return AgentContext(
        rollout_id="r1",
        messages=[{"role": "system", "content": "call submit"}, {"role": "user", "content": "add 2 and 2"}],
        tools={},
        policy=policy,
        sampling=SamplingParams(),
        limits=Limits(**limits),
        record=records,
        keep=records.keep,
        sandbox=sandbox,
    )


@asynccontextmanager
async def place() -> AsyncIterator[Sandbox]:
    sandbox = await LocalProvider().start("local", SandboxSpec())
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def run_program(
    program: str,
    *script: Completion | Exception,
    records: _Records | None = None,
    agent: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    **more: Any,
) -> AgentResult:
    return run_harness(harness(program, **more), *script, records=records, agent=agent, limits=limits)


def run_harness(
    described: Harness,
    *script: Completion | Exception,
    records: _Records | None = None,
    agent: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
) -> AgentResult:
    async def main() -> AgentResult:
        async with place() as sandbox:
            agent_under_test = HarnessAgent(described, inside=str(sandbox.socket_folder), **(agent or {}))
            context = context_of(sandbox, ScriptedPolicy(*script), records or _Records(), **(limits or {}))
            return await agent_under_test.run(context)

    return asyncio.run(main())


def test_printed_text_is_the_answer() -> None:
    records = _Records()
    result = run_program("print(ask(task), ask('sure?'))", answering("4"), answering("yes"), records=records)
    assert result == AgentResult(Outcome.ANSWERED, "4 yes")
    assert [call.messages[0]["content"] for call in records.calls] == ["add 2 and 2", "sure?"]
    assert records.kept["little.stdout.txt"].data == b"4 yes\n"


def test_output_file_is_the_answer() -> None:
    program = "json.dump({'answer': ask(task)}, open('out.json', 'w'))"

    def read(text: str) -> AgentResult:
        return AgentResult(Outcome.SUBMITTED, json.loads(text)["answer"])

    assert run_program(program, answering("4"), output="out.json", read=read) == AgentResult(Outcome.SUBMITTED, "4")
    with pytest.raises(AgentError, match="did not leave a valid output"):
        run_program("ask(task)", answering("4"), output="out.json", read=read)
    with pytest.raises(AgentError, match="did not leave a valid output"):
        run_program("ask(task); open('out.json', 'w').write('{}')", answering("4"), output="out.json", read=read)


def test_very_long_answer_is_cut() -> None:
    result = run_program("ask(task); print('x' * 3_000_000)", answering("4"))
    assert result.answer == "x" * 1_000_000


def test_environment_variables_are_passed() -> None:
    result = run_program("ask(task); print(os.environ['COLOUR'])", answering("4"), environment={"COLOUR": "blue"})
    assert result.answer == "blue"


def test_agent_that_makes_no_call_is_an_error() -> None:
    records = _Records()
    with pytest.raises(AgentError, match=r"r1: agent little ended without any answer of its model\..*: bye"):
        run_program("print('bye')", records=records)
    assert records.kept["little.stdout.txt"].data == b"bye\n"


def test_crash_is_an_error_with_the_last_lines() -> None:
    records = _Records()
    with pytest.raises(AgentError, match=r"(?s)ended with code 1\. .*`farm artefacts r1`, ends: .*ZeroDivisionError"):
        run_program("print(ask(task)); 1 / 0", answering("4"), records=records)
    assert b"ZeroDivisionError" in records.kept["little.stderr.txt"].data
    assert len(records.calls) == 1


def test_connection_that_outlives_a_crash_is_not_in_the_last_lines() -> None:
    """It belongs to a child process of the agent, and is closed only when the relay ends."""
    holds = (
        "import socket, subprocess, urllib.parse; url = urllib.parse.urlparse(os.environ['OPENAI_BASE_URL']);"
        "line = socket.create_connection((url.hostname, url.port)); line.sendall(b'GET');"
        "subprocess.Popen(['sleep', '60'], pass_fds=[line.fileno()], stderr=-3, start_new_session=True);"
    )
    records = _Records()
    with pytest.raises(AgentError, match=r"ZeroDivisionError"):
        run_program(f"{holds} print(ask(task)); 1 / 0", answering("4"), records=records)
    assert b"Exception in callback" not in records.kept["little.stderr.txt"].data


def test_last_lines_are_sanitized_for_a_message() -> None:
    program = "print(ask(task), 'x' * 1_000_000, chr(0), chr(27) + '[31mred' + chr(27) + '[0m', sep='\\n'); 1 / 0"
    with pytest.raises(AgentError) as raised:
        run_program(program, answering("4"))
    message = str(raised.value)
    assert len(message) < 2000
    assert "\nred\n" in message
    assert not {"\0", "\x1b"} & set(message)


@pytest.mark.parametrize(
    "left", ["null", "[]", '"text"', "{}", '{"info": []}', '{"info": {"exit_status": []}}', "[" * 100_000, "NaN"]
)
def test_garbage_result_is_reported(left: str) -> None:
    program = f"ask(task); open('out.json', 'w').write({left!r})"
    with pytest.raises(AgentError, match="did not leave a valid output"):
        run_program(program, answering("4"), output="out.json", read=MINI_SWE_AGENT.read)


def test_error_text_of_a_result_is_sanitized_for_a_message() -> None:
    program = "ask(task); json.dump({'info': {'exit_status': '\\0' + 'x' * 1_000_000}}, open('out', 'w'))"
    with pytest.raises(AgentError, match="it ended as") as raised:
        run_program(program, answering("4"), output="out", read=MINI_SWE_AGENT.read)
    assert len(str(raised.value)) < 2000


def test_answer_is_sanitized_for_a_database() -> None:
    message = json.dumps({"info": {"exit_status": "Submitted", "submission": "a\0b\ud800c"}})
    result = run_program(
        f"ask(task); open('out', 'w').write({message!r})", answering("4"), output="out", read=MINI_SWE_AGENT.read
    )
    assert result.answer == "ab?c"


def test_answer_must_be_text() -> None:
    program = "ask(task); json.dump({'info': {'exit_status': 'Submitted', 'submission': {'a': 1}}}, open('out', 'w'))"
    with pytest.raises(AgentError, match="its answer must be a text, not dict"):
        run_program(program, answering("4"), output="out", read=MINI_SWE_AGENT.read)


def test_missing_command_is_an_error() -> None:
    with pytest.raises(AgentError, match="no-such-program"):
        run_program("", command=lambda task: ["no-such-program"])


@pytest.mark.parametrize("end", ["", "; sys.exit(1)", "; import time; time.sleep(3600)"])
@pytest.mark.parametrize(
    ("limits", "outcome"), [({"max_turns": 1}, Outcome.MAX_TURNS), ({"max_tokens": 10}, Outcome.MAX_TOKENS)]
)
def test_exceeded_limit_is_an_outcome_whatever_the_exit_code(
    end: str, limits: dict[str, int], outcome: Outcome
) -> None:
    program = f"ask(task); assert ask('more') == 403{end}"
    assert run_program(program, answering("4"), limits=limits, agent={"grace_s": 1.0}) == AgentResult(outcome)


@pytest.mark.parametrize("end", ["", "; sys.exit(1)"])
def test_repeating_policy_is_ended(end: str) -> None:
    program = f"said = [ask(task, *['4', 'Are you sure?'] * n) for n in range(3)]; assert said == ['4', '4', 403]{end}"
    assert run_program(program, answering("4"), answering("4"), limits={"max_repeats": 2}) == AgentResult(
        Outcome.REPEATING
    )


def test_full_context_is_an_outcome() -> None:
    full = LimitReached(Outcome.CONTEXT_FULL, "full")
    assert run_program("ask(task); ask('more')", answering("4"), full) == AgentResult(Outcome.CONTEXT_FULL)
    shortened = run_program("ask(task); ask('more'); print(ask('less'))", answering("4"), full, answering("5"))
    assert shortened == AgentResult(Outcome.ANSWERED, "5")


@pytest.mark.parametrize("end", ["", "; sys.exit(1)"])
def test_failed_engine_is_an_error_not_an_answer(end: str) -> None:
    with pytest.raises(EngineError, match="gone"):
        run_program(f"ask(task); print(ask('more')){end}", answering("4"), EngineError("gone"))


def test_recovered_engine_error_is_ignored() -> None:
    result = run_program("ask(task); print(ask(task))", EngineError("gone"), answering("4"))
    assert result == AgentResult(Outcome.ANSWERED, "4")


def test_stale_weights_end_the_agent() -> None:
    with pytest.raises(StaleRollout):
        run_program("ask(task)", StaleRollout("overtaken", restart=False))


def test_farm_bug_is_an_error() -> None:
    with pytest.raises(AgentError, match="ZeroDivisionError"):
        run_program("ask(task)", ZeroDivisionError("x"))


def test_agent_that_never_calls_is_ended() -> None:
    # a busy machine may need more than the first of these limits to start it
    for start_s in (1, 8, 64):
        records = _Records()
        with pytest.raises(
            AgentError, match=rf"sent no request to its model within {start_s} s, and was ended"
        ) as raised:
            run_program(
                "print('up', flush=True); import time; time.sleep(3600)", agent={"start_s": start_s}, records=records
            )
        if "ends: up" in str(raised.value):
            break
    assert "ends: up" in str(raised.value)
    assert records.kept["little.stdout.txt"].data == b"up\n"


def test_agent_without_a_sandbox_is_refused() -> None:
    context = context_of(None, ScriptedPolicy(), _Records())
    with pytest.raises(AgentError, match="needs a sandbox"):
        asyncio.run(HarnessAgent(harness("")).run(context))


def test_lost_sandbox_is_a_sandbox_error(tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = FakeSandbox()
        sandbox.socket_folder = tmp_path
        await sandbox.stop()
        await HarnessAgent(harness("")).run(context_of(sandbox, ScriptedPolicy(), _Records()))

    with pytest.raises(SandboxError):
        asyncio.run(main())


class Waiting(ScriptedPolicy):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def complete(self, *_: Any, **__: Any) -> Completion:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("end", ["", "; import signal; signal.pause()"])
def test_output_is_kept_even_if_cancelled(end: str) -> None:
    async def main() -> None:
        async with place() as sandbox:
            policy = Waiting()
            program = f"print('I begin', flush=True)\ntry: ask(task)\nfinally: print('bye', flush=True){end}"
            agent = HarnessAgent(harness(program), inside=str(sandbox.socket_folder))
            run_task = asyncio.create_task(agent.run(context_of(sandbox, policy, records)))
            await policy.begun.wait()
            run_task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run_task

    records = _Records()
    asyncio.run(main())
    assert records.kept["little.stdout.txt"].data.startswith(b"I begin\n")


def test_cancellation_ends_the_command() -> None:
    async def main() -> None:
        async with place() as sandbox:
            agent = HarnessAgent(harness(f"'{mark}'; ask(task)"), inside=str(sandbox.socket_folder))
            policy = Waiting()
            run_task = asyncio.create_task(agent.run(context_of(sandbox, policy, _Records())))
            await policy.begun.wait()
            assert await asyncio.to_thread(running)
            run_task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run_task
            async with asyncio.timeout(120):
                while await asyncio.to_thread(running):
                    pass

    def running() -> bool:
        return any(mark.encode() in result for result in map(command_line, Path("/proc").glob("[0-9]*")))

    mark = uuid4().hex
    asyncio.run(main())


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_packages_of_the_agent_are_separate_from_those_of_the_instance() -> None:
    agent = mini_swe_agent()
    spec = agent.sandbox(SandboxSpec(packages=("iniconfig==2.1.0",), workdir="/there"))
    assert (spec.packages, spec.workdir) == (("iniconfig==2.1.0",), "/there")
    assert "mini-swe-agent==2.4.6" in spec.agent_packages
    assert agent.sandbox(None).agent_packages == spec.agent_packages


@pytest.mark.parametrize(
    ("status", "outcome"), [("Submitted", Outcome.SUBMITTED), ("RepeatedFormatError", Outcome.INVALID_ACTION)]
)
def test_end_status_of_mini_swe_agent_is_mapped(status: str, outcome: Outcome) -> None:
    trajectory = json.dumps({"info": {"exit_status": status, "submission": "done"}})
    assert MINI_SWE_AGENT.read(trajectory) == AgentResult(outcome, "done")


def test_unknown_end_status_of_mini_swe_agent_is_refused() -> None:
    with pytest.raises(ValueError, match="TimeExceeded"):
        MINI_SWE_AGENT.read(json.dumps({"info": {"exit_status": "TimeExceeded"}}))


def test_config_of_mini_swe_agent_has_the_unchanged_task() -> None:
    (text,) = MINI_SWE_AGENT.files(Task("fix it: 'quotes' and {{ braces }}", Limits(tool_s=45.0))).values()
    config = json.loads(text)
    assert config["run"] == {"task": "fix it: 'quotes' and {{ braces }}"}
    assert config["environment"]["timeout"] == 45
