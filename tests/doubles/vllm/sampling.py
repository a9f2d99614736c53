"""The three sampling endpoints of vLLM, complete and streamed."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from farm.records.trajectory import TokenIds
from tests.doubles.double_machine import DoubleMachine
from tests.doubles.vllm.chat import ChatAnswer
from tests.doubles.vllm.completions import CompletionsAnswer
from tests.doubles.vllm.generate import GenerateTextAnswer
from tests.doubles.vllm.image_parts import with_places
from tests.doubles.vllm.requests import COMPLETION_TOKENS, VllmChatBody, VllmCompletionsBody
from workers.testing.engine.vllm.sampling import GENERATE, AnswerWriter, SamplingEndpoints, VllmGenerateBody
from workers.testing.engine.web import RequestRefused, SamplingRequest, ids_of, parsed

FINGERPRINT = "test-double-that-plays-scripts"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT, GENERATE)


class AllSamplingEndpoints(SamplingEndpoints):
    """`versions`: completions and chat report weight versions, as from 0.33 on; then calls during a pause are refused,
    too. `tokens_in`: /inference/v1/generate exists.
    """

    _machine: DoubleMachine

    def __init__(self, machine: DoubleMachine, *, versions: bool, stream_tokens: int, tokens_in: bool) -> None:
        super().__init__(machine, stream_tokens=stream_tokens)
        self._versions = versions
        self._tokens_in = tokens_in

    def routes(self) -> list[Route]:
        return [
            *super().routes(),
            Route(COMPLETIONS, self._completions, methods=["POST"]),
            Route(CHAT, self._chat, methods=["POST"]),
        ]

    async def _completions(self, request: Request) -> Response:
        body = parsed(VllmCompletionsBody, await self._body(request))
        if body.echo:
            raise RequestRefused("this test double does not echo", param="echo")
        prompts = self._prompts(body.prompt)
        name = self._id("cmpl", request, body)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        result = [
            self._sampling_request(body, body, one, prompt, body.max_tokens or COMPLETION_TOKENS)
            for one, prompt in zip(names, prompts, strict=True)
        ]
        answer = CompletionsAnswer(
            self._machine, body, result, name=name, fingerprint=FINGERPRINT, versions=self._versions
        )
        return await self._answered(request, body, answer, result)

    async def _chat(self, request: Request) -> Response:
        body = parsed(VllmChatBody, await self._body(request))
        machine = self._machine
        body.messages = with_places(body.messages, machine.name, takes_images=machine.takes_images)
        text = machine.prompt_text(body.messages, body.tools, body.chat_template_kwargs)
        sampling_request = self._sampling_request(
            body,
            body,
            self._id("chatcmpl", request, body),
            self._machine.vocabulary.encode(text),
            body.max_completion_tokens or body.max_tokens,
        )
        answer = ChatAnswer(
            self._machine, body, sampling_request, prompt_text=text, fingerprint=FINGERPRINT, versions=self._versions
        )
        return await self._answered(request, body, answer, [sampling_request])

    async def _generate(self, request: Request) -> Response:
        if not self._tokens_in:
            raise RequestRefused("The generate endpoint is not enabled.", status=403, kind="PermissionDeniedError")
        return await super()._generate(request)

    def _writer(self, body: VllmGenerateBody, sampling_request: SamplingRequest) -> AnswerWriter:
        if body.output_mode == "text":
            return GenerateTextAnswer(self._machine, body, sampling_request)
        return super()._writer(body, sampling_request)

    def _check_paused(self) -> None:
        if self._versions:
            super()._check_paused()

    def _prompts(self, prompt: Any) -> list[TokenIds]:
        """Return the prompts of a text, ids, or a list of either."""
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        result = [
            self._machine.vocabulary.encode(one) if isinstance(one, str) else ids_of(one, self._machine.vocabulary.size)
            for one in (prompt if several else [prompt])
        ]
        if not all(len(one) for one in result):
            raise RequestRefused("The prompt must not be empty", param="prompt")
        return result
