"""LLMs of roles besides the policy, such as a judge or a simulated user, and the handlers that need them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message

if TYPE_CHECKING:
    from workers.plugins.interfaces import Evaluator


MAX_TOKENS = 4096
"""Maximum number of tokens of an answer if the request sets none."""


class ChatModel(Protocol):
    """The LLM of a role besides the policy. Its output is never trained on."""

    @property
    def model(self) -> str:
        """The model's name; empty for the first model that the server lists."""
        ...

    @property
    def blocked(self) -> str:
        """The reason why calls are blocked, as in `Policy`; empty if they are not."""
        ...

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        """Return the text of its next message, without the reasoning. Limits concurrent calls and retries failures.

        Raises EngineError, which names the role, if there is no answer.
        """
        ...

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Completion:
        """Return its next message, with tool calls; otherwise like `complete`."""
        ...


NO_MODELS: Mapping[str, ChatModel] = MappingProxyType({})
"""The models of a batch that names no role."""


class RoleHandler(Protocol):
    """Methods of a `Handler` whose instances may need LLMs besides the policy."""

    def roles(self, instance: Any) -> Collection[str]:
        """Return the roles that an instance needs; a batch that does not define them is refused."""
        ...

    def evaluator(self, instance: Any, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        """Return the instance's evaluator. `models` holds the batch's roles, at least those that the instance needs."""
        ...
