"""The tool calls of a rollout as a terminal session: each command with its output, at the time it ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from farm.records.trajectory import Message, ModelCall
from farm.web.transcript import ShownCall, tool_calls
from farm.web.untrusted_text import text_of

_PROMPTS = {
    "bash": "$",
    "shell": "$",
    "sh": "$",
    "terminal": "$",
    "execute_bash": "$",
    "python": ">>>",
    "ipython": ">>>",
}
_COMMANDS = ("command", "cmd", "commands", "keystrokes", "input", "code", "script")


@dataclass(frozen=True, slots=True)
class TerminalStep:
    """A command and its output; `at_s` is when the command was written, in seconds from the first call.

    `output` is None if none was recorded: the rollout ended before, or is running.
    """

    at_s: float
    prompt: str
    command: str
    output: str | None


def terminal_steps(calls: Sequence[ModelCall]) -> list[TerminalStep]:
    """Return the tool calls of some model calls in order, with the outputs that the policy was shown."""
    results: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for number, call in enumerate(calls):
        # an agent program sends results with its next call; ids may be reused
        for after, messages in ((number - 1, call.messages), (number, call.observations)):
            for id, text in _results(messages):
                results[id].append((after, text))
    steps = []
    for number, call in enumerate(calls):
        at_s = call.started_at + call.latency_s - calls[0].started_at
        nameless = iter([text for after, text in results[""] if after == number])
        for id, made in zip(_ids(call.response), tool_calls(call.response), strict=True):
            answers = (text for after, text in results.get(id, ()) if after >= number)
            output = next(nameless if not id else answers, None)
            steps.append(TerminalStep(at_s, _PROMPTS.get(made.name, made.name), _command(made), output))
    return steps


def _results(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the id, empty if there is none, and the text of each tool result."""
    for message in messages:
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id") or ""), text_of(message.get("content"))


def _ids(message: Message) -> list[str]:
    made: Any = message.get("tool_calls") or ()
    each_made = made if isinstance(made, list | tuple) else (made,)
    return [str(each.get("id") or "") if isinstance(each, dict) else "" for each in each_made]


def _command(made: ShownCall) -> str:
    """Return the command line of a call: the argument that holds a command, or all arguments by name."""
    arguments = dict(made.arguments)
    name = next((each for each in _COMMANDS if each in arguments), None)
    if name is not None:
        return arguments[name]
    return "\n".join(f"{name}: {value}" if name else value for name, value in made.arguments)
