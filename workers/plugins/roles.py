"""The LLMs of roles besides the policy, and what a handler adds whose instances need one: a judge, a simulated user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message

if TYPE_CHECKING:
    from workers.plugins.interfaces import Evaluator


MAX_TOKENS = 4096
"""The most tokens of an answer whose request does not say so."""


class ChatModel(Protocol):
    """The LLM of a role besides the policy. What it says is never trained on."""

    @property
    def model(self) -> str:
        """The model's name; empty if it is whichever the server lists first."""
        ...

    @property
    def blocked(self) -> str:
        """The reason calls get no answer now, as of `Policy`."""
        ...

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        """Return the text of its next message, without its reasoning. Concurrent calls are limited, failures retried.

        Raises EngineError, which names the role, if no answer can be had.
        """
        ...

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Completion:
        """Return its next message, with tool calls. Else as `complete`."""
        ...


NO_MODELS: Mapping[str, ChatModel] = MappingProxyType({})
"""The models of a batch that names no role."""


class RoleHandler(Protocol):
    """The methods of a handler of which some instances need LLMs besides the policy; it is a `Handler`, too."""

    def roles(self, instance: Any) -> Collection[str]:
        """Return the roles that an instance needs; a batch that does not name them is refused."""
        ...

    def evaluator(self, instance: Any, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        """Return its evaluator. `models` are those of the batch's roles, and at least those that the instance needs."""
        ...
