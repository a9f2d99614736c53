"""The answers of /inference/v1/generate, with text."""

from __future__ import annotations

from typing import Any

from tests.doubles.vllm.answer_text import TextResponseWriter, TextStream
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.vllm.sampling import GenerateAnswer, VllmGenerateBody
from workers.testing.engine.web import SamplingRequest


class GenerateTextAnswer(GenerateAnswer):
    """The answer of one call for which text is requested."""

    def __init__(self, machine: Machine, request: VllmGenerateBody, sampling_request: SamplingRequest) -> None:
        super().__init__(machine, request, sampling_request)
        self._text_writer = TextResponseWriter(machine)
        self._texts: dict[int, TextStream] = {}

    def choice(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        choice = super().choice(index, run, begin, end, last=last)
        has_logprobs = choice.pop("logprobs") is not None
        text = self._texts.setdefault(index, TextStream(self._machine, run))
        choice["text"] = text.feed(end, last=last)
        choice["logprobs"] = self._text_writer.of_chat(run, begin, end, 1) if has_logprobs else None
        return choice
