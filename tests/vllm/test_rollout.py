"""A conversation of several turns with a real vLLM: one training row, with the sampled ids."""

from __future__ import annotations

import asyncio

import numpy as np

from farm.records.request import SamplingParams
from farm.records.trajectory import Message, ModelCall, segments
from tests.vllm.server import RealVllm
from workers.policy.generation import EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.recording import Stopwatch, model_call
from workers.policy.routing.backend import record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
N_TURNS = 4


def test_conversation_is_one_exact_training_row(vllm: RealVllm) -> None:
    async def main() -> list[ModelCall]:
        address = EngineAddress(f"{vllm.url}/v1", tokenizer=str(vllm.weights[0]))
        pool = EnginePool(lambda: [record_of(address)])
        policy = RolloutPolicy(StickyRouter(pool, RoutingKey("r1")), "r1")
        messages: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
        calls = []
        try:
            for index in range(N_TURNS):
                completion = await policy.complete(messages, TOOLS, SamplingParams(seed=index), 24)
                calls.append(model_call(index, [], completion, Stopwatch(), {}, TOOLS))
                messages = [*messages, completion.response, {"role": "user", "content": f"Go on, {index} ✓"}]
        finally:
            await pool.aclose()
        return calls

    calls = asyncio.run(main())
    assert all(call.token_exact for call in calls)
    assert [call.mismatch for call in calls] == [None] * N_TURNS
    (row,) = segments(calls)
    sampled = [call.response_ids for call in calls if call.response_ids is not None]
    assert np.array_equal(row.response_ids[row.response_mask == 1], np.concatenate(sampled))
    assert (row.response_logprobs[row.response_mask == 1] <= 0).all()
