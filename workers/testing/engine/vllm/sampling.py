"""vLLM's endpoints that sample from token ids, whole and streamed: ids and log-probabilities together.

Request bodies have the fields that the double uses; others are ignored, as by vLLM.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from farm.records.trajectory import TokenIds
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.simulated_values import npy_of, rank
from workers.testing.engine.web import (
    EventStream,
    Json,
    RequestRefused,
    SamplingRequest,
    body_of,
    ids_of,
    parsed,
    while_connected,
)

CREATED = 1_767_225_600
"""Creation time in responses: constant, so that responses are reproducible."""
GENERATE = "/inference/v1/generate"


class StreamOptions(BaseModel):
    include_usage: bool = False


class VllmSampling(BaseModel):
    """The fields common to all requests."""

    model_config = ConfigDict(extra="ignore", strict=False)

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=64)
    temperature: float | None = Field(None, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class VllmCommonBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class GenerateSampling(VllmSampling):
    logprobs: int | None = None
    routed_experts_prompt_start: int = Field(0, ge=0)


class VllmGenerateBody(VllmCommonBody):
    token_ids: Any
    sampling_params: GenerateSampling
    output_mode: Literal["tokens", "text"] = "tokens"


def usage(
    runs: Sequence[EngineRun], n_prompts: int, *, created: int | None = None, brief: bool = False
) -> dict[str, Any]:
    """Return the usage of an answer, or of a stream's last chunk, which omits unset fields."""
    n_prompt = sum(len(run.prompt) for run in runs[:: max(len(runs) // n_prompts, 1)])
    n_sampled = sum(run.n_sampled for run in runs)
    details: dict[str, Any] = {"cached_tokens": runs[0].n_cached}
    details |= {"created_cache_tokens": created, "multimodal_tokens": None}
    if brief:
        details = {name: value for name, value in details.items() if value is not None}
    whole = {
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_sampled,
        "completion_tokens": n_sampled,
        "prompt_tokens_details": details,
    }
    return whole if brief else {**whole, "completion_tokens_details": None}


def spans(run: EngineRun) -> list[dict[str, Any]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in run.spans]


class ResponseWriter:
    """Formats the ids [begin, end) of a run."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def logprobs(self, run: EngineRun, begin: int, end: int) -> list[float]:
        values: list[float] = self._machine.logprobs(run, begin, end).astype(float).tolist()
        return values

    def of_generate(self, run: EngineRun, begin: int, end: int) -> dict[str, Any]:
        whole = [
            {"token_id": id_, "logprob": value, "rank": rank(value)}
            for id_, value in zip(
                run.ids[begin:end].tolist(),
                self.logprobs(run, begin, end),
                strict=False,
            )
        ]
        return {"content": [{**one, "top_logprobs": [one]} for one in whole]}


class GenerateAnswer:
    """The answer to one call."""

    def __init__(self, machine: Machine, request: VllmGenerateBody, sampling_request: SamplingRequest) -> None:
        self._machine = machine
        self._request = request
        self._sampling_request = sampling_request
        self._writer = ResponseWriter(machine)
        self._first_expert = request.sampling_params.routed_experts_prompt_start

    def whole(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            "request_id": self._sampling_request.request_id,
            "model": self._machine.name,
            "created": CREATED,
            "usage": usage(runs, 1),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": runs[0].prompt if self._request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self._request.output_mode,
            "choices": [self.choice(index, run, 0, run.n_sampled, last=True) for index, run in enumerate(runs)],
        }

    def opening(self, runs: Sequence[EngineRun]) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        echo = {"prompt_token_ids": run.prompt}
        return {
            "request_id": self._sampling_request.request_id,
            "usage": None,
            **(echo if self._request.return_token_ids and not begin else {}),
            "output_mode": self._request.output_mode,
            "choices": [self.choice(index, run, begin, end, last=last)],
        }

    def closing(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            "request_id": self._sampling_request.request_id,
            "usage": usage(runs, 1, brief=True),
            "output_mode": self._request.output_mode,
            "choices": [],
        }

    def choice(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        """Return the ids [begin, end) of one sample with their metadata."""
        has_logprobs = self._request.sampling_params.logprobs is not None
        return {
            "index": index,
            "finish_reason": run.finish_reason if last else None,
            "stop_reason": run.stop_reason if last else None,
            "token_ids": run.ids[begin:end],
            "routed_experts": npy_of(self._machine.experts, run, self._first_expert) if last else None,
            "sampling_mask": None,
            "weight_versions": spans(run) if last else None,
            "logprobs": self._writer.of_generate(run, begin, end) if has_logprobs else None,
        }


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
