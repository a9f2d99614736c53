"""The server that ProRL's trainer starts: only `/generate`, with the fields of vLLM's sampling parameters.

Source: verl_custom/nvidia/rollout/vllm_async_server.py. Values that vLLM refuses raise an exception there, so the
answer is 500 without a reason. Log-probabilities are after temperature. An answer does not say why it ended.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from workers.testing.engine.vllm.sampling import complete
from workers.testing.engine.web import Json, RequestRefused, SamplingRequest, body_of, ids_of, while_connected

_SAMPLING = frozenset(("temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "logprobs"))
GENERATE = "/generate"


class ProrlDouble:
    """One server, with FastAPI's description of itself."""

    paths = frozenset((GENERATE,))

    def __init__(self, machine: DoubleMachine) -> None:
        self._machine = machine
        self._n_calls = 0

    def routes(self) -> list[Route]:
        return [Route(GENERATE, self._generate, methods=["POST"]), Route("/openapi.json", self._description)]

    @staticmethod
    def error(refused: RequestRefused) -> Response:
        return PlainTextResponse("Internal Server Error", 500)

    async def _description(self, request: Request) -> Response:
        title = {"title": "FastAPI", "version": "0.1.0"}
        return Json({"openapi": "3.1.0", "info": title, "paths": {GENERATE: {"post": {"operationId": "generate"}}}})

    async def _generate(self, request: Request) -> Response:
        body = await body_of(request)
        prompt = ids_of(body.pop("prompt_ids"), self._machine.vocabulary.size, "Token id {token} is out of vocabulary")
        if unknown := body.keys() - _SAMPLING:
            raise RequestRefused(f"Unexpected keyword argument {sorted(unknown)[0]!r}")
        if len(prompt) >= self._machine.context_tokens:
            raise RequestRefused("The decoder prompt is longer than the maximum model length")
        self._n_calls += 1
        room = self._machine.context_tokens - len(prompt)
        sampling_request = SamplingRequest(
            request_id=f"call-{self._n_calls}",
            prompt=prompt,
            max_tokens=min(body.get("max_tokens", 16), room),
            stop=tuple(body.get("stop") or ()),
            seed=body.get("seed"),
        )
        run = self._machine.run(sampling_request)
        await while_connected(request.receive, complete([self._machine.sample(run)]))
        logprobs = self._machine.logprobs(run, 0, run.n_sampled, body.get("temperature", 1.0))
        ids = run.ids[: run.n_sampled].tolist()
        return Json({"response_ids": ids, "logprobs": logprobs.astype(float).tolist()})
