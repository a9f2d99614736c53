"""Records the calls of roles' LLMs during a rollout: one artefact, separate from the policy's calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message
from workers.plugins.interfaces import Artefact, ChatModel

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam


class RoleCalls:
    """The role calls of one rollout, in the order of their answers: one JSON object each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, models: Mapping[str, ChatModel]) -> Mapping[str, ChatModel]:
        """Return the models, wrapped so that each call is recorded here."""
        return {role: _RecordedModel(role, model, self.lines) for role, model in models.items()}

    def artefact(self) -> Artefact:
        """Return the calls as JSON lines."""
        return Artefact("role-calls.jsonl", "application/jsonl", "".join(self.lines).encode())


class _RecordedModel:
    """A model that records its calls."""

    def __init__(self, role: str, model: ChatModel, lines: list[str]) -> None:
        self._role = role
        self._model = model
        self._lines = lines

    @property
    def model(self) -> str:
        return self._model.model

    @property
    def blocked(self) -> str:
        return self._model.blocked

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        reply = await self._model.complete(messages, sampling)
        self._keep(messages, sampling, reply)
        return reply

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[ChatCompletionToolParam], sampling: SamplingParams
    ) -> Completion:
        completion = await self._model.answer(messages, tools, sampling)
        self._keep(messages, sampling, completion.response)
        return completion

    def _keep(self, messages: Sequence[Message], sampling: SamplingParams, reply: str | Message) -> None:
        call = {
            "role": self._role,
            "model": self.model,
            "messages": list(messages),
            "sampling": sampling.model_dump(mode="json", exclude_defaults=True),
            "reply": reply,
        }
        self._lines.append(json.dumps(call) + "\n")
