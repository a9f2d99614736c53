"""The contract of an environment with steps, on one page; standard library only, as it is loaded in the sandbox too.

An environment is a class, named by an entry point of `farm.environments`. On the node only its class attributes are
read; objects are made in its sandbox, one for each rollout, in a process forked from one that has done the `imports`.
What that process prints, raises or leaves behind concerns no other rollout. The policy is not in this sandbox: all that
it can do to an environment is to send an Action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

ChatMessage: TypeAlias = Mapping[str, Any]
"""A chat message as the OpenAI API writes it: `role` and `content`, a text; `tool_call_id` if the role is `tool`."""

AskModel: TypeAlias = Callable[[str, Sequence[ChatMessage]], str]
"""Sends a conversation to the LLM of a role of the batch, such as `user`, and returns what it says. Blocks."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call of one of the environment's tools; `arguments` are a JSON object, not checked against its schema."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy. `text` is all that it said beside its calls, without its reasoning."""

    text: str
    tool_calls: tuple[CalledTool, ...] = ()


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """A problem of reasoning-gym, whose answers the node verifies: the rewards of its episode are the node's verdicts.

    `entry` is the entry as the library made it, plain JSON; `settings` are those of its dataset.
    """

    family: str
    entry: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of an episode: the conversation that the policy is given, and the tools that it may call."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    """As the OpenAI API describes them: {"type": "function", "function": {name, description, parameters}}."""
    problem: PosedProblem | None = None
    """Set before any text of the policy is read; from then on only `answer` of a step counts, and no `reward`."""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to an action. `reward` is for this action alone: those of an episode are added up.

    `terminated` says that the episode has come to its end, `truncated` that a limit of the environment's own has ended
    it. `info` is JSON for people. `answer` is the answer to the episode's problem, to be verified by the node.
    """

    messages: Sequence[ChatMessage] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """The fields of the instance that is played. Equal episodes with one seed give equal observations."""

    id: str = ""
    """The name of one of the package's environments."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[ChatMessage] = ()
    """A prompt that the instance brings along."""
    seed: int = 0


class Environment(Protocol):
    """One episode. What it raises is never a reward.

    A step that raises, ends or hangs is repeated in a fresh process, after an episode without the policy's texts. If
    that breaks too, the attempt has failed; if the policy's texts break it once more, the step is worth 0 and the last.

    `random`, and NumPy's generator if it is imported, are seeded before `reset`. Class attributes, all optional:

    * `packages`: exact requirements, `name==version`, of the Python environment that it runs in;
    * `without_dependencies`: True if `packages` are all there is to install, as where the declared ones clash;
    * `imports`: modules that are imported once, before rollouts are forked;
    * `modules`: names of modules of the plug-in that the class's own module imports, sent along with it;
    * `rewards`: the least and the most reward of one step, (-1, 1) unless it is set; a reward outside is never given;
    * `roles`: LLMs besides the policy that it asks, such as `user`;
    * `image`, `network`, `memory_mb`, `env`: of its sandbox; memory is of one rollout;
    * `shared`: False if each rollout is to have a sandbox of its own. In a shared one an episode computes, reads files
      and asks models, and no more: writing files, connections, threads, processes and signals are refused. True unless
      it is set, or `network` is True.
    """

    def __init__(self, ask: AskModel) -> None: ...

    def reset(self, episode: Episode) -> Begin:
        """Begin the episode. Called once."""
        ...

    def step(self, action: Action) -> Step:
        """Carry out an action. Called until the episode has ended, or a limit of the rollout has."""
        ...

    def close(self) -> float | None:
        """Return a last reward, if there is one. Called once, also where a limit has ended the episode."""
        ...

    # Optional: `reference() -> str | None` returns a text that solves the episode from where it stands. It is played
    # where the policy's texts broke the environment. Without it "I do not know." is.
