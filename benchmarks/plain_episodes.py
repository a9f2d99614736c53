"""Episodes of "follow the files" without the farm: a loop on the engine's own API, with or without sandboxes.

It samples the same as the farm: the same prompts, parameters and seeds on the same engine. Nothing is stored, retried
or checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx2
import orjson
from tokenizers import Tokenizer

from examples.training.file_chains import DATA_SOURCE, FileChain
from examples.training.follow_files.follow_files import FollowFilesHandler, FollowFilesInstance
from examples.training.turn_text import CALL, CALL_END, TURN_END, observation, opening
from farm.errors import SandboxError
from farm.seeds import call_seed, rollout_seed
from workers.sandboxes.provider import NodeSandboxProvider
from workers.tools.bash import BashArguments, BashTool

WIDTH = 64
"""Concurrent episodes: the default number of a node."""
STARTS = 4
"""Concurrent starts of sandboxes: the default number of a node."""
MAX_TURNS = 7
MAX_TOKENS = 12
_TOOL_S = 60.0
_IDLE_S = 2.0
_TRIES = 3
"""A server may close an idle connection at the moment of its next use."""


@dataclass(frozen=True, slots=True)
class PlainEpisode:
    """The result of one episode."""

    reward: float
    n_turns: int
    n_tokens: int


@dataclass(slots=True)
class PlainLoop:
    """Runs episodes on the engine at `url`; with a `provider`, each in its own sandbox, started directly."""

    url: str
    tokenizer: Tokenizer
    provider: NodeSandboxProvider | None = None

    async def run_episodes(self, chains: Sequence[FileChain], n_samples: int, seed: int) -> list[PlainEpisode]:
        """Run each problem `n_samples` times, WIDTH episodes at a time."""
        slots, starts = asyncio.Semaphore(WIDTH), asyncio.Semaphore(STARTS)
        limits = httpx2.Limits(max_connections=WIDTH, keepalive_expiry=_IDLE_S)
        headers = {"content-type": "application/json"}
        async with httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=300, limits=limits) as client:

            async def one(chain: FileChain, first_seed: int) -> PlainEpisode:
                async with slots, self._files(chain, starts) as files:
                    return await self._episode(client, chain, files, first_seed)

            return await asyncio.gather(
                *(
                    one(chain, rollout_seed(seed, DATA_SOURCE, chain.fields, group, sample))
                    for group, chain in enumerate(chains)
                    for sample in range(n_samples)
                )
            )

    @asynccontextmanager
    async def _files(self, chain: FileChain, starts: asyncio.Semaphore) -> AsyncIterator[BashTool | None]:
        """Yield a shell in a sandbox with the files, if there are sandboxes."""
        if self.provider is None:
            yield None
            return
        handler = FollowFilesHandler(FollowFilesInstance.model_validate(chain.fields))
        spec = handler.sandbox()
        assert spec is not None

        async def prepare(sandbox: Any) -> None:
            await handler.prepare(sandbox)

        async with starts:
            name = f"benchmark-{uuid4().hex[:12]}"
            what = orjson.dumps(chain.fields, option=orjson.OPT_SORT_KEYS).decode()
            sandbox = await self.provider.start_prepared(name, spec, what, prepare)
        tool = BashTool(sandbox)
        try:
            yield tool
        finally:
            await tool.close()
            with suppress(SandboxError):
                await sandbox.stop()

    async def _episode(
        self, client: httpx2.AsyncClient, chain: FileChain, files: BashTool | None, seed: int
    ) -> PlainEpisode:
        ids = self._ids(opening(chain.request))
        n_turns = n_tokens = 0
        while n_turns < MAX_TURNS:
            sampled = await self._sampled(client, ids, call_seed(seed, n_turns))
            n_turns += 1
            n_tokens += len(sampled)
            ids += sampled
            text = self.tokenizer.decode(sampled, skip_special_tokens=False).removesuffix(TURN_END)
            if not (text.startswith(CALL) and text.endswith(CALL_END)):
                return PlainEpisode(float(text == f"answer {chain.answer}"), n_turns, n_tokens)
            name = text[len(CALL) : -len(CALL_END)]
            if files is None:
                output = chain.files.get(name, "")
            else:
                output = (await files.call(BashArguments.model_validate({"command": f"cat {name}"}), _TOOL_S)).text
            ids += self._ids(observation(output))
        return PlainEpisode(0.0, n_turns, n_tokens)

    async def _sampled(self, client: httpx2.AsyncClient, ids: list[int], seed: int) -> list[int]:
        sampling = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": seed, "logprobs": 0, "detokenize": False}
        body = {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
        for tries in range(_TRIES):
            try:
                answer = await client.post("/inference/v1/generate", content=orjson.dumps(body))
                break
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if tries == _TRIES - 1:
                    raise
        if not answer.is_success:
            raise RuntimeError(f"the engine refused {len(ids)} tokens: {answer.text[:500]}")
        [choice] = orjson.loads(answer.content)["choices"]
        sampled: list[int] = choice["token_ids"]
        return sampled

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids
