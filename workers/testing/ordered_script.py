"""Scripts without problems: turns in order, or one shell command by any tool that the prompt offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.trajectory import Message
from workers.testing.hermes_text import listed_tools
from workers.testing.scripted_model import DONE, GIVE_UP, Script, ScriptedCall, ScriptedTurn

SHELL_WORDS = ("bash", "shell", "terminal", "exec", "command", "run")
COMMAND_ARGUMENTS = ("command", "cmd", "script", "code", "input", "keystrokes")
LAST_TOOLS = ("final_answer", "finish", "submit", "complete")
"""Names of tools by which a program's policy finishes."""
_FILLED: Mapping[str, Any] = {"string": "a command", "integer": 10, "number": 10, "boolean": False, "array": []}


class OrderedScript(Script):
    """Turns in order, also for a program that rewrites its history, in which no turn would be recognised.

    GIVE_UP if no user message contains the text `match`, as when a program requests a title; DONE after the last turn.
    """

    def __init__(self, turns: Sequence[ScriptedTurn], match: str) -> None:
        super().__init__([])
        self._turns, self._match = turns, match
        # A program may start with an example turn that was never sampled.
        self._n_before: int | None = None

    def next_turn(self, messages: Sequence[Message], seed: int | None, begun: str = "") -> ScriptedTurn:
        if not any(self._match in str(message.get("content")) for message in messages if message["role"] == "user"):
            return GIVE_UP
        n_answers = sum(message["role"] == "assistant" for message in messages)
        self._n_before = n_answers if self._n_before is None else self._n_before
        n_turns = n_answers - self._n_before
        return self._turn(n_turns, messages)

    def _turn(self, index: int, messages: Sequence[Message]) -> ScriptedTurn:
        return self._turns[index] if index < len(self._turns) else DONE


class ShellScript(OrderedScript):
    """One shell command by a tool that the prompt lists, if any; then `last`, by a finishing tool if there is one.

    `tool` is the name of the first tool.
    """

    def __init__(self, command: str, last: str, match: str) -> None:
        super().__init__([], match)
        self._command = command
        self._last = last
        self.tool = ""

    def _turn(self, index: int, messages: Sequence[Message]) -> ScriptedTurn:
        tools = listed_tools(str(messages[0].get("content")))
        call = shell_call(tools, self._command) if index == 0 else None
        if call is not None:
            self.tool = call.name
            return ScriptedTurn(content="I run a command.", tool_calls=(call,))
        final = last_call(tools, self._last)
        return ScriptedTurn(content=self._last, tool_calls=() if final is None else (final,))


def shell_call(tools: Sequence[Mapping[str, Any]], command: str) -> ScriptedCall | None:
    """Return a call of the first tool that accepts a shell command; None if there is none."""
    for tool in tools:
        schema = tool.get("parameters") or {}
        properties = schema.get("properties") or {}
        argument = next((name for name in COMMAND_ARGUMENTS if name in properties), "")
        if argument and any(word in tool["name"].lower() for word in SHELL_WORDS):
            arguments = {name: _filled(properties.get(name) or {}) for name in schema.get("required") or ()}
            is_list = (properties[argument] or {}).get("type") == "array"
            arguments[argument] = ["bash", "-c", command] if is_list else command
            return ScriptedCall(name=tool["name"], arguments=arguments)
    return None


def last_call(tools: Sequence[Mapping[str, Any]], text: str) -> ScriptedCall | None:
    """Return a call of the tool by which a policy finishes; None if there is none."""
    for tool in tools:
        if any(word in tool["name"].lower() for word in LAST_TOOLS):
            schema = tool.get("parameters") or {}
            properties = schema.get("properties") or {}
            filled = {name: _filled(properties.get(name) or {}) for name in schema.get("required") or ()}
            texts = {name: text for name, value in filled.items() if value == _FILLED["string"]}
            return ScriptedCall(name=tool["name"], arguments=filled | texts)
    return None


def _filled(schema: Mapping[str, Any]) -> Any:
    return schema["enum"][0] if schema.get("enum") else _FILLED.get(str(schema.get("type")), {})
