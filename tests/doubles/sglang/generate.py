"""SGLang's own /generate: each event of its stream repeats all ids so far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.sglang.prompts import RequestReader, finish
from tests.doubles.sglang.requests import SglangGenerateBody
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.vllm.sampling import complete, spans
from workers.testing.engine.web import EventStream, Json, RequestRefused, body_of, parsed, while_connected


class GenerateEndpoint:
    """`stream_tokens` is the number of ids per event."""

    def __init__(self, machine: DoubleMachine, *, stream_tokens: int) -> None:
        self._machine = machine
        self._asking = RequestReader(machine)
        self._stream_tokens = stream_tokens

    async def generate(self, request: Request) -> Response:
        body = parsed(SglangGenerateBody, await body_of(request))
        if body.lora_path:
            raise RequestRefused(f"The following requested LoRA adapters are not loaded: {{'{body.lora_path}'}}")
        sampling = body.sampling_params
        sampling_request = self._asking.sampling_request(
            body.rid,
            self._asking.prompt(body.text, body.input_ids),
            sampling.max_new_tokens,
            stop=sampling.stop,
            stop_token_ids=frozenset(sampling.stop_token_ids or ()),
            ignore_eos=sampling.ignore_eos,
            seed=sampling.sampling_seed,
            salt=body.cache_salt or "",
        )
        run = self._machine.run(sampling_request)
        sample = self._machine.sample(run)
        if body.stream:
            return EventStream(self._chunks(body, run, sample))
        await while_connected(request.receive, complete([sample]))
        return Json(self._answer(body, run, run.n_sampled, last=True))

    async def _chunks(
        self, body: SglangGenerateBody, run: EngineRun, sample: AsyncIterator[int]
    ) -> AsyncIterator[dict[str, Any]]:
        begin = 0
        async with aclosing(sample):  # type: ignore[type-var]
            async for n in sample:
                for end in range(begin + self._stream_tokens, n, self._stream_tokens):
                    yield self._answer(body, run, end, last=False)
                    begin = end
        yield self._answer(body, run, run.n_sampled, last=True)

    def _answer(self, body: SglangGenerateBody, run: EngineRun, n: int, *, last: bool) -> dict[str, Any]:
        text = self._machine.text(run) if last else self._machine.vocabulary.decode(run.ids[:n]).rstrip("�")
        meta: dict[str, Any] = {
            "id": run.run_id,
            "finish_reason": finish(run) if last else None,
            "prompt_tokens": len(run.prompt),
            "completion_tokens": n,
            "cached_tokens": run.n_cached,
            "reasoning_tokens": 0,
            "num_retractions": 0,
            "weight_version": self._machine.scheduler.version,
            "e2e_latency": 0.0,
        }
        if last:
            meta["weight_versions"] = spans(run)
            if body.return_routed_experts and self._machine.experts is not None:
                meta["routed_experts"] = self._machine.experts.in_int32(run, body.routed_experts_start_len)
        if body.return_logprob:
            meta["output_token_logprobs"] = self._asking.logprobs(
                run, n, body.sampling_params.temperature, texts=body.return_text_in_logprobs
            )
            meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
            meta["input_token_logprobs"] = []
        answer: dict[str, Any] = {"text": text, "output_ids": run.ids[:n], "meta_info": meta}
        if body.return_prompt_token_ids:
            answer["prompt_token_ids"] = run.prompt
        return answer
