"""The contract of a multi-step environment; standard library only, as it is also loaded in the sandbox.

An environment is a class, registered by an entry point of `farm.environments`. The node reads only its class
attributes; objects are created in its sandbox, one per rollout, in a process forked from one that has done the
`imports`. Output, exceptions and leftovers of that process affect no other rollout. The policy is not in this sandbox:
it can only send an Action to the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

ChatMessage: TypeAlias = Mapping[str, Any]
"""A chat message in the OpenAI API's form: `role` and `content`, a text; `tool_call_id` if the role is `tool`."""

AskModel: TypeAlias = Callable[[str, Sequence[ChatMessage]], str]
"""Sends a conversation to the batch's LLM of a role, such as `user`, and returns its reply. Blocks."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call of one of the environment's tools; `arguments` are a JSON object, not checked against its schema."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy. `text` is its message, without its calls and its reasoning."""

    text: str
    tool_calls: tuple[CalledTool, ...] = ()


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """A problem of reasoning-gym, whose answers the node verifies: the rewards of its episode are the node's verdicts.

    `entry` is the library's entry as plain JSON; `settings` are those of its dataset.
    """

    family: str
    entry: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of an episode: the initial conversation, and the tools that the policy may call."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    """In the OpenAI API's form: {"type": "function", "function": {name, description, parameters}}."""
    problem: PosedProblem | None = None
    """Set before any text of the policy is read; then only `answer` of a step counts, and `reward` is ignored."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action. `reward` is for this action only: an episode's reward is their sum.

    `terminated`: the episode has reached its end; `truncated`: a limit of the environment has ended it. `info` is JSON
    for people. `answer` is the answer to the episode's problem, to be verified by the node.
    """

    messages: Sequence[ChatMessage] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """The fields of the instance. Equal episodes with the same seed give equal observations."""

    id: str = ""
    """The name of one of the package's environments."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[ChatMessage] = ()
    """A prompt that the instance provides."""
    seed: int = 0


class Environment(Protocol):
    """One episode. An exception is never a reward.

    A step that raises, exits or hangs is repeated in a fresh process, after an episode without the policy's texts. If
    that fails too, the attempt has failed; if only the policy's texts make it fail again, the step is worth 0 and is
    the last.

    `random`, and NumPy's generator if it is imported, are seeded before `reset`. Class attributes, all optional:

    * `packages`: exact requirements, `name==version`, of its Python environment;
    * `without_dependencies`: True to install only `packages`, for example if their declared dependencies conflict;
    * `imports`: modules that are imported once, before rollouts are forked;
    * `modules`: names of the plug-in's modules that the class's own module imports; they are sent along with it;
    * `rewards`: minimum and maximum reward of one step, by default (-1, 1); a reward outside is an error;
    * `roles`: LLMs besides the policy that it calls, such as `user`;
    * `image`, `network`, `memory_mb`, `env`: of its sandbox; memory is per rollout;
    * `shared`: False to give each rollout its own sandbox. In a shared one an episode can only compute, read files and
      call models: writing files, connections, threads, processes and signals are refused. By default True, unless
      `network` is True.
    """

    def __init__(self, ask: AskModel) -> None: ...

    def reset(self, episode: Episode) -> Begin:
        """Begin the episode. Called once."""

    def step(self, action: Action) -> Step:
        """Carry out an action. Called until the episode or a limit of the rollout ends."""

    def close(self) -> float | None:
        """Return a last reward, if there is one. Called once, also if a limit has ended the episode."""

    # Optional: `reference() -> str | None` returns a text that solves the episode from its current state. It is used as
    # the control if the policy's texts broke the environment; the default is "I do not know."
