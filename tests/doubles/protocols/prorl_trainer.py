"""The rollout side of ProRL's trainer: the requests of its AsyncLLMServerManager, and its use of the answers.

Source: trainer_integration/verl/verl_custom/nvidia/rollout/async_server.py. LLM servers are cleared and added once.
Around every batch it calls `/start` and `/stop`, and continues if they fail; in between it keeps a pool of requests in
flight. An answer counts if its status is 200 and it has messages; other requests are repeated, three times in all.
After a broken connection it retries until there is an answer. With dynamic filtering it names its jobs, stops when it
has enough, and cancels the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2

ATTEMPTS = 3
SAMPLING: dict[str, Any] = {
    "model": "hosted_vllm/scripted",
    "api_key": "dummy_key",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 1.4,
    "top_p": 0.95,
    "max_iterations": 30,
    "max_output_tokens": 64,
    "token_level_generation": True,
    "custom_tokenizer": "Qwen/Qwen3-4B-Instruct-2507",
    "max_model_len": 2048,
    "ensure_thinking_end_properly": False,
}

Result = dict[str, Any]


class ProrlTrainer:
    """One trainer. `url` has the key as its password, as its client sends no header of its own."""

    def __init__(self, url: str, n_workers: int = 70, timeout_s: float = 1000.0, **sampling: Any) -> None:
        self.sampling = SAMPLING | sampling
        self.answers: list[tuple[str, int]] = []
        """The verb and status of each answer except those of `/process`."""
        self.n_requests = 0
        self._url = url.rstrip("/")
        self._n_workers = n_workers
        self._timeout_s = timeout_s

    async def use_servers(self, addresses: Sequence[str]) -> None:
        """Replace the LLM servers by these."""
        async with self._client(30.0) as client:
            await self._order(client, "clear_llm_server")
            await asyncio.gather(*(self._order(client, "add_llm_server", {"address": each}) for each in addresses))

    async def rollouts(self, instances: Sequence[dict[str, Any]], enough: int | None = None) -> list[Result | None]:
        """Run a batch; None for abandoned ones. With `enough`, jobs are named, and the rest is cancelled then."""
        results: list[Result | None] = [None] * len(instances)
        left = list(range(len(instances)))[::-1]
        done = asyncio.Event()
        async with self._client(self._timeout_s) as client:
            await self._order(client, "start")
            try:

                async def work() -> None:
                    while left and not done.is_set():
                        index = left.pop()
                        job = None if enough is None else f"job-{index}"
                        results[index] = await self._result_of(client, instances[index], job, done)
                        if enough is not None and sum(each is not None for each in results) >= enough:
                            done.set()

                workers = [asyncio.create_task(work()) for _ in range(min(self._n_workers, len(instances)))]
                if enough is not None:
                    await done.wait()
                    rest = [index for index, result in enumerate(results) if result is None]
                    await asyncio.gather(*(self._order(client, "cancel", {"job_id": f"job-{each}"}) for each in rest))
                await asyncio.gather(*workers)
            finally:
                await self._order(client, "stop")
        return results

    async def _result_of(
        self, client: httpx2.AsyncClient, instance: dict[str, Any], job: str | None, done: asyncio.Event
    ) -> Result | None:
        body = {"instance": instance, "sampling_params": self.sampling} | ({"job_id": job} if job else {})
        n_answers = 0
        while n_answers < ATTEMPTS and not done.is_set():
            self.n_requests += 1
            try:
                answer = await client.post(f"{self._url}/process", json=body)
            except httpx2.TransportError:
                # its client counts these and retries at once, and so gives up on a server that restarts
                await asyncio.sleep(1.0)
                continue
            n_answers += 1
            if answer.status_code == 200 and answer.json().get("messages"):
                result: Result = answer.json()
                return result
        return None

    async def _order(self, client: httpx2.AsyncClient, verb: str, body: dict[str, str] | None = None) -> None:
        """Send an order; the trainer only logs its failure."""
        try:
            answer = (
                await client.post(f"{self._url}/{verb}", json=body)
                if body
                else await client.post(f"{self._url}/{verb}")
            )
        except httpx2.HTTPError:
            self.answers.append((verb, 0))
        else:
            self.answers.append((verb, answer.status_code))

    def _client(self, timeout_s: float) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx2.AsyncClient(timeout=timeout_s, limits=limits)


def training_row(result: Result) -> tuple[list[int], list[int], list[float]]:
    """Return (ids, loss mask, log-probabilities) as the trainer concatenates them from the messages."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for message in result["messages"]:
        sampled = message["role"] == "assistant"
        ids += message["token_ids"]
        mask += [int(sampled)] * len(message["token_ids"])
        logprobs += message["logprobs"] if sampled else [0.0] * len(message["token_ids"])
    return ids, mask, logprobs
