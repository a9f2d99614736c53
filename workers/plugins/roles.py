"""LLMs of roles besides the policy, such as a judge or a simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message

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
