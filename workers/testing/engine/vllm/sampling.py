"""The three endpoints of vLLM that sample, whole and streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from farm.trajectory import TokenIds
from workers.testing.engine.asked import Asked, Refused, ids_of, parsed
from workers.testing.engine.machine import Machine
from workers.testing.engine.run import Run
from workers.testing.engine.vllm.chat import ChatAnswer
from workers.testing.engine.vllm.completions import CompletionsAnswer
from workers.testing.engine.vllm.generate import GenerateAnswer
from workers.testing.engine.vllm.requests import COMPLETION_TOKENS, Chat, Common, Completions, Generate, Sampling
from workers.testing.engine.web import EventStream, Json, body_of, while_connected

FINGERPRINT = "test-double-that-plays-scripts"
OWNER = "vllm-test-double"
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class Answer(Protocol):
    """One call's answer, as its endpoint writes it."""

    def whole(self, runs: Sequence[Run]) -> dict[str, Any]: ...

    def opening(self) -> Iterator[dict[str, Any]]: ...

    def chunk(self, index: int, run: Run, begin: int, end: int, *, last: bool) -> dict[str, Any]: ...

    def closing(self, runs: Sequence[Run]) -> dict[str, Any]: ...


class SamplingEndpoints:
    """`versions`: whether completions and chat tell weight versions, as from 0.33 on; then calls during a pause are
    refused, too. `stream_tokens` is how many ids a chunk has. `tokens_in`: whether there is /inference/v1/generate."""

    def __init__(self, machine: Machine, *, versions: bool, stream_tokens: int, tokens_in: bool) -> None:
        self._machine = machine
        self._versions = versions
        self._stream_tokens = stream_tokens
        self._tokens_in = tokens_in

    def routes(self) -> list[Route]:
        endpoints = (self._completions, self._chat, self._generate)
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in zip(PATHS, endpoints, strict=True)]

    async def _completions(self, request: Request) -> Response:
        body = parsed(Completions, await self._body(request))
        if body.echo:
            raise Refused("this test double does not echo", param="echo")
        prompts = self._prompts(body.prompt)
        name = self._id("cmpl", request, body)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        asked = [
            self._asked(request, body, body, one, prompt, body.max_tokens or COMPLETION_TOKENS)
            for one, prompt in zip(names, prompts, strict=True)
        ]
        answer = CompletionsAnswer(
            self._machine, body, asked, name=name, fingerprint=FINGERPRINT, versions=self._versions
        )
        return await self._answered(request, body, answer, asked)

    async def _chat(self, request: Request) -> Response:
        body = parsed(Chat, await self._body(request))
        text = self._machine.prompt_text(body.messages, body.tools, body.chat_template_kwargs)
        asked = self._asked(
            request,
            body,
            body,
            self._id("chatcmpl", request, body),
            self._machine.vocabulary.encode(text),
            body.max_completion_tokens or body.max_tokens,
        )
        answer = ChatAnswer(
            self._machine, body, asked, prompt_text=text, fingerprint=FINGERPRINT, versions=self._versions
        )
        return await self._answered(request, body, answer, [asked])

    async def _generate(self, request: Request) -> Response:
        if not self._tokens_in:
            raise Refused("The generate endpoint is not enabled.", status=403, kind="PermissionDeniedError")
        body = parsed(Generate, await self._body(request))
        prompt = ids_of(body.token_ids, self._machine.vocabulary.size)
        if not len(prompt):
            raise Refused("token_ids must have at least one id", kind="Bad Request", param="body.token_ids")
        sampling = body.sampling_params
        name = self._id("generate-tokens", request, body)
        asked = self._asked(request, body, sampling, name, prompt, sampling.max_tokens)
        return await self._answered(request, body, GenerateAnswer(self._machine, body, asked), [asked])

    async def _body(self, request: Request) -> dict[str, Any]:
        if self._versions and self._machine.scheduler.paused in ("abort", "wait"):
            raise Refused(
                "Generation is paused. Please retry after it resumes.", status=503, kind="ServiceUnavailableError"
            )
        body = await body_of(request)
        model = body.get("model")
        if model and model != self._machine.name:
            message = f"The model `{model}` does not exist. Valid aliases: {self._machine.name}."
            raise Refused(message, status=404, kind="NotFoundError", param="model")
        return body

    def _prompts(self, prompt: Any) -> list[TokenIds]:
        """The prompt is a text, ids, or a list of either."""
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        found = [
            self._machine.vocabulary.encode(one) if isinstance(one, str) else ids_of(one, self._machine.vocabulary.size)
            for one in (prompt if several else [prompt])
        ]
        if not all(len(one) for one in found):
            raise Refused("The prompt must not be empty", param="prompt")
        return found

    def _id(self, prefix: str, request: Request, body: Common) -> str:
        given = request.headers.get("x-request-id") or body.request_id
        return f"{prefix}-{given or uuid.uuid4().hex[:16]}"

    def _asked(
        self, request: Request, body: Common, sampling: Sampling, name: str, prompt: TokenIds, max_tokens: int | None
    ) -> Asked:
        return Asked(
            request_id=name,
            prompt=prompt,
            max_tokens=max_tokens,
            n=sampling.n,
            seed=sampling.seed,
            stop=sampling.stops,
            stop_token_ids=frozenset(sampling.stop_token_ids or ()),
            ignore_eos=sampling.ignore_eos,
            salt=body.cache_salt or "",
            fault=request.scope.get("fault", ""),
        )

    async def _answered(self, request: Request, body: Common, answer: Answer, asked: Sequence[Asked]) -> Response:
        runs = [self._machine.run(one, index) for one in asked for index in range(one.n)]
        samples = [self._machine.sample(run) for run in runs]
        if body.stream:
            return EventStream(self._chunks(answer, runs, samples, include_usage=body.include_usage))
        await while_connected(request.receive, complete(samples))
        return Json(answer.whole(runs))

    async def _chunks(
        self, answer: Answer, runs: Sequence[Run], samples: Sequence[AsyncIterator[int]], *, include_usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        for chunk in answer.opening():
            yield chunk
        for index, (run, sample) in enumerate(zip(runs, samples, strict=True)):
            begin = 0
            async with aclosing(sample):  # type: ignore[type-var]
                async for n in sample:
                    # The last ids wait until the run has ended, and with it its finish reason is known.
                    held = n if not run.ended else n - 1
                    for end in _ends(begin, held, self._stream_tokens):
                        yield answer.chunk(index, run, begin, end, last=False)
                        begin = end
            yield answer.chunk(index, run, begin, run.n_sampled, last=True)
        if include_usage:
            yield answer.closing(runs)


def _ends(begin: int, end: int, step: int) -> Iterator[int]:
    yield from range(begin + step, end, step)
    if end > begin:
        yield end


async def complete(samples: Sequence[AsyncIterator[int]]) -> None:
    """Until all of them have ended."""
    await asyncio.gather(*map(_exhausted, samples))


async def _exhausted(sample: AsyncIterator[int]) -> None:
    async with aclosing(sample):  # type: ignore[type-var]
        async for _ in sample:
            pass
