"""The machine of a double: that of the scripted engine, with faults, chat templates and a temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import jinja2
import numpy as np

from farm.records.trajectory import LogProbs, Message, TokenIds
from tests.doubles.faults import Faults
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.web import RequestRefused, SamplingRequest

struck: ContextVar[str] = ContextVar("struck", default="")
"""The fault of the present request, of the kinds that only the machine can inject."""
LEAST = -1e-6
"""The log-probability of each token at temperature 0."""


@dataclass(slots=True, eq=False)
class FaultyRun(EngineRun):
    """A run of a call that may have a fault."""

    fault: str = ""


class DoubleMachine(Machine):
    """`faults` and `takes_images`, whether the model takes images, are set by its double."""

    faults: Faults
    takes_images = False

    def run(self, request: SamplingRequest, index: int = 0) -> EngineRun:
        values = {
            field.name: getattr(run, field.name) for run in [super().run(request, index)] for field in fields(run)
        }
        run = FaultyRun(**values, fault=struck.get())
        run.extra_s = {"slow": self.faults.slow_s, "hang": inf}.get(run.fault, 0.0)
        if run.fault == "echo":
            run.prompt = self._another(run.prompt)
        return run

    def logprobs(self, run: EngineRun, begin: int, end: int, temperature: float | None = None) -> LogProbs:
        """Return log-probabilities after the temperature if one is given, else before it."""
        values = super().logprobs(run, begin, end)
        if temperature is not None:
            values = values / np.float32(temperature) if temperature > 0 else np.full(len(values), LEAST, np.float32)
        too_few = isinstance(run, FaultyRun) and run.fault == "lengths" and run.ended and end == run.n_sampled
        return values[:-1] if too_few else values

    def prompt_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Render messages with the chat template. Raises RequestRefused if it does not accept them."""
        if not all(isinstance(message.get("role"), str) for message in messages):
            raise RequestRefused("every message needs a role", kind="Bad Request", param="messages")
        try:
            return self.vocabulary.render(messages, tools or (), generation_prompt=generation_prompt, **(kwargs or {}))
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise RequestRefused(f"The chat template refuses the messages: {error}") from None

    def _another(self, prompt: TokenIds) -> TokenIds:
        """Return a prompt in which one id differs."""
        other = prompt.copy()
        other[len(other) // 2] = (other[len(other) // 2] + 1) % self.vocabulary.n_plain
        return other
