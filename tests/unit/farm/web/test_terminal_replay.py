"""A terminal session has each command once, in order, with the output that the policy saw."""

from __future__ import annotations

import json
from typing import Any

from farm.records.trajectory import ModelCall
from farm.web.rollout_views import TerminalStep, terminal_steps
from tests.services.model_calls import model_call


def called(index: int, *tools: tuple[str, str, Any], messages: Any = (), observations: Any = ()) -> ModelCall:
    made = [{"id": id, "function": {"name": name, "arguments": json.dumps(arguments)}} for id, name, arguments in tools]
    response = {"role": "assistant", "content": "", "tool_calls": made}
    return model_call(
        index,
        messages=list(messages),
        response=response,
        observations=list(observations),
        started_at=100.0 + 10 * index,
        latency_s=2.0,
    )


def tool_result(id: str, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_commands_have_their_outputs_and_times() -> None:
    calls = [
        called(
            0,
            ("a", "bash", {"command": "ls"}),
            ("b", "python", {"code": "1+1"}),
            observations=[tool_result("b", "2"), tool_result("a", "x")],
        ),
        called(
            1, ("c", "edit", {"path": "f", "n": 3}), observations=[tool_result("c", [{"type": "text", "text": "done"}])]
        ),
        called(2, ("d", "bash", {"command": "sleep 9"})),
    ]
    assert terminal_steps(calls) == [
        TerminalStep(2.0, "$", "ls", "x"),
        TerminalStep(2.0, ">>>", "1+1", "2"),
        TerminalStep(12.0, "edit", "path: f\nn: 3", "done"),
        TerminalStep(22.0, "$", "sleep 9", None),
    ]


def test_results_of_agent_programs_are_in_their_next_call() -> None:
    # this program uses one id for all its calls
    calls = [
        called(0, ("call", "bash", {"command": "first"})),
        called(1, ("call", "bash", {"command": "second"}), messages=[tool_result("call", "of the first")]),
        called(2, messages=[tool_result("call", "of the second")]),
    ]
    assert [(each.command, each.output) for each in terminal_steps(calls)] == [
        ("first", "of the first"),
        ("second", "of the second"),
    ]


def test_results_without_an_id_belong_to_the_calls_in_order() -> None:
    nameless = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    calls = [called(0, ("", "bash", {"command": "a"}), ("", "bash", {"command": "b"}), observations=nameless)]
    assert [each.output for each in terminal_steps(calls)] == ["one", "two"]


def test_calls_of_any_shape_are_shown() -> None:
    for made in ("text", [3], [None], {"function": {"name": "bash", "arguments": "not JSON"}}, [{"function": 1}], None):
        call = model_call(0, response={"role": "assistant", "tool_calls": made})
        assert len(terminal_steps([call])) == (0 if made is None else 1)
    assert terminal_steps([]) == []
