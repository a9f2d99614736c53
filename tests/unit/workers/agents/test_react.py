from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from farm.errors import AgentError, EngineError, LimitReached, SandboxError, ToolError
from farm.records.request import Limits, SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall
from workers.agents.react import ReactAgent
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Completion, Observation, Policy, Tool
from workers.testing import EchoTool, ScriptedPolicy, answering, calling
from workers.testing.fakes import EchoArguments

PROMPT = [{"role": "user", "content": "begin"}]


class Recorder:
    """Keeps a copy of each record, as a store would, and artefacts while it has room for their bytes."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.calls: list[ModelCall] = []
        self.artefacts: dict[str, Artefact] = {}
        self._room = room

    async def __call__(self, call: ModelCall) -> None:
        self.calls.append(copy.deepcopy(call))

    async def keep(self, index: int, artefact: Artefact) -> str:
        if len(artefact.data) > self._room:
            return ""
        self._room -= len(artefact.data)
        self.artefacts[f"{index}-{artefact.name}"] = artefact
        return f"{index}-{artefact.name}"


def run_agent(
    policy: Policy,
    tool: Tool | None = None,
    sampling: SamplingParams | None = None,
    record: Recorder | None = None,
    **limits: Any,
) -> tuple[AgentResult, list[ModelCall]]:
    record = record or Recorder()
    context = AgentContext(
        rollout_id="r1",
        messages=list(PROMPT),
        tools={"echo": tool or EchoTool()},
        policy=policy,
        sampling=sampling or SamplingParams(seed=7),
        limits=Limits(**limits),
        record=record,
        keep=record.keep,
    )
    return asyncio.run(ReactAgent().run(context)), record.calls


def observed(calls: Sequence[ModelCall]) -> list[str]:
    """Return the observations of the last record of each call, in order."""
    last = {call.index: call for call in calls}
    return [message["content"] for index in sorted(last) for message in last[index].observations]


def test_rollout_ends_with_the_submission() -> None:
    policy = ScriptedPolicy(calling(("echo", {"text": "hello"})), calling(("echo", {"text": "42", "done": True})))
    result, calls = run_agent(policy)
    assert result == AgentResult(Outcome.SUBMITTED, "42")
    assert [(call.index, len(call.observations)) for call in calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert observed(calls) == ["hello", "42"]


def test_policy_sees_its_own_turns_and_the_observations() -> None:
    first = calling(("echo", {"text": "hello"}))
    policy = ScriptedPolicy(first, answering("bye"))
    run_agent(policy)
    assert policy.requests[0][0] == PROMPT
    assert policy.requests[1][0] == [
        *PROMPT,
        first.response,
        {"role": "tool", "tool_call_id": "call_0", "content": "hello"},
    ]


def test_each_message_is_recorded_once() -> None:
    _, calls = run_agent(ScriptedPolicy(calling(("echo", {"text": "x"})), answering("bye")))
    assert [call.messages for call in calls if not call.observations] == [PROMPT, []]


def test_tools_shown_to_the_policy_are_recorded() -> None:
    shown: list[Any] = []

    class Watched(ScriptedPolicy):
        async def complete(
            self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *rest: Any, **more: Any
        ) -> Completion:
            shown.append(list(tools))
            return await super().complete(messages, tools, *rest, **more)

    _, calls = run_agent(Watched(calling(("echo", {"text": "x"})), answering("bye")))
    assert [each["function"]["name"] for each in shown[0]] == ["echo"]
    assert [call.tools for call in calls] == [shown[call.index] for call in calls]


def test_plain_text_is_an_answer() -> None:
    result, calls = run_agent(ScriptedPolicy(answering("it is 4")))
    assert result == AgentResult(Outcome.ANSWERED, "it is 4")
    assert len(calls) == 1


def test_sampling_is_recorded_as_sent() -> None:
    policy = ScriptedPolicy(calling(("echo", {})), answering("bye"))
    _, calls = run_agent(policy, sampling=SamplingParams(temperature=0.5, seed=3, max_tokens=25), max_tokens=30)
    assert [result[2] for result in policy.requests] == [25, 20]
    assert calls[-1].sampling == {"temperature": 0.5, "seed": 3, "stop": [], "max_tokens": 20}


def test_max_turns() -> None:
    result, calls = run_agent(ScriptedPolicy(*[calling(("echo", {}))] * 3), max_turns=3)
    assert result.outcome is Outcome.MAX_TURNS
    assert calls[-1].index == 2


def test_max_tokens() -> None:
    result, _ = run_agent(ScriptedPolicy(*[calling(("echo", {}))] * 2), max_tokens=20)
    assert result.outcome is Outcome.MAX_TOKENS


@pytest.mark.parametrize(
    ("n_tokens", "sampling_max", "outcome"),
    [
        (20, None, Outcome.MAX_TOKENS),
        (7, None, Outcome.CONTEXT_FULL),
        (5, 5, Outcome.MAX_TOKENS),
        (4, 5, Outcome.CONTEXT_FULL),
    ],
)
def test_outcome_of_a_cut_text_depends_on_the_limit_reached(
    n_tokens: int, sampling_max: int | None, outcome: Outcome
) -> None:
    cut = answering("it is", finish_reason="length", n_tokens=n_tokens)
    result, _ = run_agent(ScriptedPolicy(cut), sampling=SamplingParams(max_tokens=sampling_max), max_tokens=20)
    assert result == AgentResult(outcome, "it is")


@pytest.mark.parametrize(("budget", "n_calls"), [(20, 2), (5, 0)])
def test_text_cut_by_the_limit_of_its_call_is_an_answer(budget: int, n_calls: int) -> None:
    answers: list[str | None] = []

    async def next_messages(n_done: int, answer: str | None) -> Sequence[Message]:
        answers.append(answer)
        return [{"role": "user", "content": "And then?"}] if n_done == 1 else []

    record = Recorder()
    cut = [answering(text, finish_reason="length", n_tokens=5) for text in ("it is", "so it")]
    context = AgentContext(
        rollout_id="r1",
        messages=list(PROMPT),
        tools={},
        policy=ScriptedPolicy(*cut),
        sampling=SamplingParams(max_tokens=5),
        limits=Limits(max_tokens=budget),
        record=record,
        keep=record.keep,
        next_messages=next_messages,
    )
    result = asyncio.run(ReactAgent().run(context))
    assert result == AgentResult(Outcome.MAX_TOKENS, "so it" if n_calls else "it is")
    assert answers == ["it is", "so it"][:n_calls]


def test_full_context_is_an_outcome() -> None:
    full = LimitReached(Outcome.CONTEXT_FULL, "full")
    result, calls = run_agent(ScriptedPolicy(calling(("echo", {})), full))
    assert result.outcome is Outcome.CONTEXT_FULL
    assert calls[-1].index == 0


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (("nope", {}), "Call one of: echo"),
        (("echo", "{not json"), "are not JSON"),
        (("echo", "echo(text=x())"), "The call of echo could not be read"),
        (("", '{"arguments": {}'), "A tool call could not be read: '{\"arguments\": {}'. Write it whole"),
        (("", ""), "A tool call could not be read. Write it whole"),
        (("echo", "[1]"), "do not fit"),
        (("echo", {"text": 1}), "text: Input should be a valid string"),
        (("echo", {"txt": "x"}), "txt: Extra inputs are not permitted"),
    ],
)
def test_invalid_call_is_reported_to_the_policy(call: tuple[str, Any], complaint: str) -> None:
    tool = EchoTool()
    result, calls = run_agent(ScriptedPolicy(calling(call), answering("bye")), tool)
    assert result.outcome is Outcome.ANSWERED
    assert complaint in observed(calls)[0]
    assert tool.called == []


def test_five_invalid_calls_in_a_row_end_the_rollout() -> None:
    result, calls = run_agent(ScriptedPolicy(*[calling(("nope", {}))] * 5))
    assert result.outcome is Outcome.INVALID_ACTION
    assert len(observed(calls)) == 5


def test_valid_call_resets_the_count_of_invalid_ones() -> None:
    bad = calling(("nope", {}))
    result, _ = run_agent(ScriptedPolicy(*[bad] * 4, calling(("echo", {})), *[bad] * 4, answering("bye")))
    assert result.outcome is Outcome.ANSWERED


def test_calls_of_a_turn_run_in_order_and_stop_when_done() -> None:
    tool = EchoTool()
    turn = calling(("echo", {"text": "a"}), ("echo", {"text": "b", "done": True}), ("echo", {"text": "c"}))
    result, calls = run_agent(ScriptedPolicy(turn), tool)
    assert tool.called == ["a", "b"]
    assert result.answer == "b"
    assert observed(calls) == ["a", "b"]


def test_tool_complaint_is_an_observation() -> None:
    _, calls = run_agent(
        ScriptedPolicy(calling(("echo", {})), answering("bye")), EchoTool(ToolError("use a full path"))
    )
    assert observed(calls) == ["use a full path"]


def test_broken_tool_is_an_agent_error() -> None:
    with pytest.raises(AgentError, match="tool echo broke in rollout r1: KeyError"):
        run_agent(ScriptedPolicy(calling(("echo", {}))), EchoTool(KeyError("x")))


def test_farm_errors_are_raised_unchanged() -> None:
    with pytest.raises(SandboxError):
        run_agent(ScriptedPolicy(calling(("echo", {}))), EchoTool(SandboxError("gone")))
    with pytest.raises(EngineError):
        run_agent(ScriptedPolicy(EngineError("gone")))


def test_long_observations_are_cut_in_the_middle() -> None:
    text = "a" * 500 + "b" * 500
    policy = ScriptedPolicy(calling(("echo", {"text": text})), answering("bye"))
    _, calls = run_agent(policy, record=Recorder(room=0), max_observation_chars=200)
    (cut,) = observed(calls)
    assert len(cut) <= 200
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    n_kept = cut.count("a") + cut.count("b") - "characters dropped".count("a")
    assert f"[... {1000 - n_kept} characters dropped ...]" in cut


class Making(EchoTool):
    """Returns its own text, and creates an artefact."""

    def __init__(self, *artefacts: Artefact) -> None:
        super().__init__()
        self._artefacts = artefacts

    async def call(self, arguments: EchoArguments, timeout_s: float) -> Observation:
        return Observation(arguments.text, artefacts=self._artefacts)


def test_uncut_text_is_kept_and_named() -> None:
    record = Recorder()
    text = "é" * 500 + "b" * 500
    _, calls = run_agent(
        ScriptedPolicy(calling(("echo", {"text": text})), calling(("echo", {"text": "short"})), answering("bye")),
        record=record,
        max_observation_chars=300,
    )
    long, short = observed(calls)
    assert len(long) <= 300
    assert long.endswith("bbb\n[kept with the rollout, outside the sandbox: 0-echo.txt]")
    assert short == "short"
    assert record.artefacts == {"0-echo.txt": Artefact("echo.txt", "text/plain", text.encode())}


def test_artefact_of_a_tool_is_kept_and_named() -> None:
    record = Recorder()
    full = Artefact("bash.txt", "text/plain", b"all of it")
    image = Artefact("plot.png", "image/png", b"\x89PNG")
    turns = [calling(("echo", {"text": "x" * 900})), calling(("echo", {"text": "y"})), answering("bye")]
    _, calls = run_agent(ScriptedPolicy(*turns), Making(full, image), record=record, max_observation_chars=500)
    assert list(record.artefacts) == ["0-bash.txt", "0-plot.png", "1-bash.txt", "1-plot.png"], "no text is stored twice"
    assert observed(calls)[1] == "y\n[kept with the rollout, outside the sandbox: 1-bash.txt, 1-plot.png]"
    assert len(observed(calls)[0]) == 500


def test_whole_text_is_kept_in_addition_to_an_image() -> None:
    record = Recorder()
    image = Artefact("plot.png", "image/png", b"\x89PNG")
    run_agent(
        ScriptedPolicy(calling(("echo", {"text": "x" * 900})), answering("bye")),
        Making(image),
        record=record,
        max_observation_chars=500,
    )
    assert {name: each.media_type for name, each in record.artefacts.items()} == {
        "0-plot.png": "image/png",
        "0-echo.txt": "text/plain",
    }


def test_artefact_that_is_not_kept_is_not_named() -> None:
    _, calls = run_agent(
        ScriptedPolicy(calling(("echo", {"text": "x" * 900})), answering("bye")),
        record=Recorder(room=100),
        max_observation_chars=500,
    )
    (text,) = observed(calls)
    assert len(text) == 500
    assert "kept" not in text


def test_cancellation_is_raised_and_leaves_the_agent_usable() -> None:
    class Waiting(ScriptedPolicy):
        async def complete(self, *_: Any) -> Completion:
            result.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def cancelled() -> None:
        record = Recorder()
        context = AgentContext("r1", list(PROMPT), {}, Waiting(), SamplingParams(), Limits(), record, record.keep)
        task = asyncio.create_task(ReactAgent().run(context))
        await result.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.messages == PROMPT

    result = asyncio.Event()
    asyncio.run(cancelled())


def test_repeating_policy_is_ended() -> None:
    turns = [calling(("echo", {"text": "x"}), content=f"try {n}") for n in range(9)]
    result, calls = run_agent(ScriptedPolicy(*turns), max_repeats=3)
    assert result == AgentResult(Outcome.REPEATING)
    assert (calls[-1].index, observed(calls)) == (2, ["x"] * 3)


def test_last_allowed_turn_can_be_the_repetition() -> None:
    turns = [calling(("echo", {"text": "x"}))] * 3
    assert run_agent(ScriptedPolicy(*turns), max_repeats=3, max_turns=3)[0].outcome is Outcome.REPEATING
    assert run_agent(ScriptedPolicy(*turns), max_repeats=4, max_turns=3)[0].outcome is Outcome.MAX_TURNS


def test_alternating_policy_is_ended() -> None:
    turns = [calling(("echo", {"text": text})) for text in "ababababab"]
    result, calls = run_agent(ScriptedPolicy(*turns), max_repeats=4)
    assert (result.outcome, calls[-1].index) == (Outcome.REPEATING, 5)


def test_same_call_with_other_results_is_no_repetition() -> None:
    class Counting(EchoTool):
        n = 0

        async def call(self, arguments: EchoArguments, timeout_s: float) -> Observation:
            self.n += 1
            return Observation(f"{self.n} of 3", done=self.n == 3)

    result, _ = run_agent(ScriptedPolicy(*[calling(("echo", {}))] * 3), Counting(), max_repeats=2)
    assert result.outcome is Outcome.SUBMITTED


def test_long_output_is_a_repetition_although_its_artefact_names_differ() -> None:
    turns = [calling(("echo", {"text": "x" * 900}))] * 9
    result, calls = run_agent(ScriptedPolicy(*turns), max_repeats=3, max_observation_chars=300)
    assert (result.outcome, calls[-1].index) == (Outcome.REPEATING, 2)
    assert len(set(observed(calls))) == 3


def test_unreadable_calls_count_as_repetitions() -> None:
    result, calls = run_agent(ScriptedPolicy(*[calling(("juggle", "{"))] * 9), max_repeats=4)
    assert (result.outcome, calls[-1].index) == (Outcome.REPEATING, 3)


@pytest.mark.parametrize(("question", "outcome", "n_turns"), [("Next.", "repeating", 3), ("Step {}.", "answered", 5)])
def test_text_with_the_same_reply_of_the_task_is_a_repetition(question: str, outcome: str, n_turns: int) -> None:
    async def next_messages(n_done: int, answer: str | None) -> Sequence[Message]:
        return [{"role": "user", "content": question.format(n_done)}] if n_done < 5 else []

    record = Recorder()
    context = AgentContext(
        rollout_id="r1",
        messages=list(PROMPT),
        tools={},
        policy=ScriptedPolicy(*[answering("yes")] * 5),
        sampling=SamplingParams(),
        limits=Limits(max_repeats=3),
        record=record,
        keep=record.keep,
        next_messages=next_messages,
    )
    result = asyncio.run(ReactAgent().run(context))
    assert (result.outcome, len(record.calls)) == (outcome, n_turns)
