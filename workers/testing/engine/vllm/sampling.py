"""vLLM's endpoints that sample from token ids, whole and streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from farm.records.trajectory import TokenIds
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.model_request import RequestRefused, SamplingRequest, ids_of, parsed
from workers.testing.engine.run import EngineRun
from workers.testing.engine.vllm.generate import GenerateAnswer
from workers.testing.engine.vllm.requests import VllmCommonBody, VllmGenerateBody, VllmSampling
from workers.testing.engine.web import EventStream, Json, body_of, while_connected

GENERATE = "/inference/v1/generate"


class AnswerWriter(Protocol):
    """The answer to one call, in its endpoint's form."""

    def whole(self, runs: Sequence[EngineRun]) -> dict[str, Any]: ...

    def opening(self, runs: Sequence[EngineRun]) -> Iterator[dict[str, Any]]: ...

    def chunk(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]: ...

    def closing(self, runs: Sequence[EngineRun]) -> dict[str, Any]: ...


class SamplingEndpoints:
    """`stream_tokens` is the number of ids of a chunk. Calls are refused during a pause that aborts or drains."""

    def __init__(self, machine: Machine, *, stream_tokens: int) -> None:
        self._machine = machine
        self._stream_tokens = stream_tokens

    def routes(self) -> list[Route]:
        return [Route(GENERATE, self._generate, methods=["POST"])]

    async def _generate(self, request: Request) -> Response:
        body = parsed(VllmGenerateBody, await self._body(request))
        prompt = ids_of(body.token_ids, self._machine.vocabulary.size)
        if not len(prompt):
            raise RequestRefused("token_ids must have at least one id", kind="Bad Request", param="body.token_ids")
        sampling = body.sampling_params
        name = self._id("generate-tokens", request, body)
        sampling_request = self._sampling_request(body, sampling, name, prompt, sampling.max_tokens)
        return await self._answered(request, body, self._writer(body, sampling_request), [sampling_request])

    def _writer(self, body: VllmGenerateBody, sampling_request: SamplingRequest) -> AnswerWriter:
        if body.output_mode != "tokens":
            raise RequestRefused("the scripted engine answers with token ids only", param="output_mode")
        return GenerateAnswer(self._machine, body, sampling_request)

    def _check_paused(self) -> None:
        if self._machine.scheduler.paused in ("abort", "wait"):
            raise RequestRefused(
                "Generation is paused. Please retry after it resumes.", status=503, kind="ServiceUnavailableError"
            )

    async def _body(self, request: Request) -> dict[str, Any]:
        self._check_paused()
        body = await body_of(request)
        model = body.get("model")
        if model and model != self._machine.name:
            message = f"The model `{model}` does not exist. Valid aliases: {self._machine.name}."
            raise RequestRefused(message, status=404, kind="NotFoundError", param="model")
        return body

    def _id(self, prefix: str, request: Request, body: VllmCommonBody) -> str:
        request_id = request.headers.get("x-request-id") or body.request_id
        return f"{prefix}-{request_id or uuid.uuid4().hex[:16]}"

    def _sampling_request(
        self, body: VllmCommonBody, sampling: VllmSampling, name: str, prompt: TokenIds, max_tokens: int | None
    ) -> SamplingRequest:
        return SamplingRequest(
            request_id=name,
            prompt=prompt,
            max_tokens=max_tokens,
            n=sampling.n,
            seed=sampling.seed,
            stop=sampling.stops,
            stop_token_ids=frozenset(sampling.stop_token_ids or ()),
            ignore_eos=sampling.ignore_eos,
            salt=body.cache_salt or "",
        )

    async def _answered(
        self, request: Request, body: VllmCommonBody, answer: AnswerWriter, sampling_requests: Sequence[SamplingRequest]
    ) -> Response:
        runs = [self._machine.run(one, index) for one in sampling_requests for index in range(one.n)]
        samples = [self._machine.sample(run) for run in runs]
        if body.stream:
            return EventStream(self._chunks(answer, runs, samples, include_usage=body.include_usage))
        await while_connected(request.receive, complete(samples))
        return Json(answer.whole(runs))

    async def _chunks(
        self,
        answer: AnswerWriter,
        runs: Sequence[EngineRun],
        samples: Sequence[AsyncIterator[int]],
        *,
        include_usage: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        for chunk in answer.opening(runs):
            yield chunk
        for index, (run, sample) in enumerate(zip(runs, samples, strict=True)):
            begin = 0
            async with aclosing(sample):  # type: ignore[type-var]
                async for n in sample:
                    # The last ids wait until the run has ended and its finish reason is known.
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
    """Wait until all of them have ended."""
    await asyncio.gather(*map(_exhausted, samples))


async def _exhausted(sample: AsyncIterator[int]) -> None:
    async with aclosing(sample):  # type: ignore[type-var]
        async for _ in sample:
            pass


def error_response(refused: RequestRefused) -> Response:
    """Return a refusal in vLLM's form."""
    error = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.status}
    return Json({"error": error}, refused.status)
