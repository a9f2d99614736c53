"""The script of the scripted engine: for each problem its known branches, and the choice of the next turn.

The only state is a counter per problem: later turns find their branch from the history, so any number of rollouts,
retries and restarts of the engine continue alike. Turns are recognised by meaning, as clients return the history with
changed whitespace and rewritten JSON.

Scripts without problems have turns in order, or one shell command by any tool that the prompt offers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from farm.records.trajectory import Message
from workers.testing.hermes_text import listed_tools, message_of, written

SHELL_WORDS = ("bash", "shell", "terminal", "exec", "command", "run")
COMMAND_ARGUMENTS = ("command", "cmd", "script", "code", "input", "keystrokes")
LAST_TOOLS = ("final_answer", "finish", "submit", "complete")
"""Names of tools by which a program's policy finishes."""
_FILLED: Mapping[str, Any] = {"string": "a command", "integer": 10, "number": 10, "boolean": False, "array": []}


class ScriptedCall(BaseModel):
    """A tool call; arguments that are text are sent unchanged, JSON or not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    arguments: dict[str, Any] | str = {}

    @property
    def text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


class ScriptedTurn(BaseModel):
    """One assistant message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    reasoning: str = ""
    """Templates may drop it from the history, so turns are recognised without it."""

    @property
    def text(self) -> str:
        """The text that is sampled."""
        return written(self.content, [(call.name, call.text) for call in self.tool_calls], self.reasoning)

    def matches(self, message: Message) -> bool:
        """Return whether this message is this turn."""
        return _meaning(message) == _meaning(message_of(self.text))


GIVE_UP = ScriptedTurn(content="I am sorry, I cannot solve this problem, so I give up.")
DONE = ScriptedTurn(content="done")


class Branch(BaseModel):
    """One course of a problem; a branch with twice the weight is chosen twice as often."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    weight: float = Field(default=1.0, gt=0)
    turns: tuple[ScriptedTurn, ...] = Field(min_length=1)

    def begins_with(self, answers: Sequence[Message], begun: str) -> bool:
        return (
            len(answers) <= len(self.turns)
            and all(turn.matches(message) for turn, message in zip(self.turns, answers, strict=False))
            and self.turn(len(answers)).text.startswith(begun)
        )

    def turn(self, index: int) -> ScriptedTurn:
        """Return a turn; DONE after the last one."""
        return self.turns[index] if index < len(self.turns) else DONE


class ScriptedProblem(BaseModel):
    """A problem, recognised by a text in its first user message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(min_length=1)
    branches: tuple[Branch, ...] = Field(min_length=1, validation_alias=AliasChoices("branches", "plays"))
    """A file may also name them `plays`."""


class Script:
    """All problems that the server knows; if several match, the one with the longest text is used."""

    def __init__(self, problems: Sequence[ScriptedProblem], seed: int = 0) -> None:
        self._problems = sorted(problems, key=lambda problem: -len(problem.match))
        self._seed = seed
        self._n_begun: Counter[str] = Counter()

    @classmethod
    def read(cls, path: Path, seed: int = 0) -> Script:
        """Read a file of JSON lines. Raises pydantic's ValidationError."""
        with path.open(encoding="utf-8") as file:
            return cls([ScriptedProblem.model_validate_json(line) for line in file if line.strip()], seed)

    def next_turn(self, messages: Sequence[Message], seed: int | None, begun: str = "") -> ScriptedTurn:
        """Return the next turn, which starts with `begun`: DONE after a branch's last turn, GIVE_UP if none fits."""
        problem = self._problem(messages)
        if problem is None:
            return GIVE_UP
        answers = [message for message in messages if message["role"] == "assistant"]
        candidates = [branch for branch in problem.branches if branch.begins_with(answers, begun)]
        if not candidates:
            return GIVE_UP
        branch = self._choose(problem, candidates, seed, first=not answers and not begun)
        return branch.turn(len(answers))

    def next_branch(self, messages: Sequence[Message], seed: int) -> str:
        """Return the name of the branch that a request's seed chooses. Raises KeyError for an unknown problem."""
        problem = self._problem(messages)
        if problem is None:
            raise KeyError("the problem is not in the script")
        return self._choose(problem, problem.branches, seed, first=False).name

    def _problem(self, messages: Sequence[Message]) -> ScriptedProblem | None:
        first = next((message for message in messages if message["role"] == "user"), None)
        text = _text(first.get("content")) if first else ""
        return next((problem for problem in self._problems if problem.match in text), None)

    def _choose(
        self, problem: ScriptedProblem, candidates: Sequence[Branch], seed: int | None, *, first: bool
    ) -> Branch:
        """Return the branch that the seed chose initially if it still fits, else draw again among those that fit."""
        draw = f"seed {seed}" if seed is not None else f"count {self._count(problem, first)}"
        chosen = _draw(problem.branches, f"{self._seed}/{draw}/{problem.match}")
        return chosen if chosen in candidates else _draw(candidates, f"{self._seed}/{draw}/{problem.match}")

    def _count(self, problem: ScriptedProblem, first: bool) -> int:
        if first:
            self._n_begun[problem.match] += 1
        return self._n_begun[problem.match]


def _draw(branches: Sequence[Branch], key: str) -> Branch:
    digest = hashlib.sha256(key.encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64 * sum(branch.weight for branch in branches)
    for branch in branches:
        point -= branch.weight
        if point < 0:
            return branch
    return branches[-1]


def _meaning(message: Message) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls, without surrounding whitespace and with parsed JSON."""
    called = [call["function"] for call in message.get("tool_calls") or []]
    return _text(message.get("content")).strip(), [(call["name"], _value(call["arguments"])) for call in called]


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


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
