"""A gateway that is served for a test, the policy behind it, and clients for it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from farm.records.request import AgentRequests, Limits, SamplingParams
from farm.records.trajectory import Message, ModelCall
from workers.plugins.interfaces import NO_MODELS, AgentContext, Artefact, ChatModel, Completion, Delta, OnDelta
from workers.policy.gateway.app import Address, gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.testing import answering

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from google.genai.client import AsyncClient
    from openai import AsyncOpenAI

Answer = Callable[[Sequence[Message]], Completion | Exception]


def thinking(thought: str, completion: Completion) -> Completion:
    """Return the same completion, with reasoning before it."""
    completion.response["reasoning_content"] = thought
    return completion


def deltas(completion: Completion, size: int = 4) -> list[Delta]:
    """Return reasoning and text of a completion in small pieces."""
    result = []
    for name, reasoning in (("reasoning_content", True), ("content", False)):
        text = completion.response.get(name) or ""
        result += [Delta(text[at : at + size], reasoning) for at in range(0, len(text), size)]
    return result


class Playing:
    """A policy that follows its script in order, or answers by a function; streams its answers in pieces.

    `gate`, if any, holds each call until it is set; `cancelled` counts the cancelled calls.
    """

    def __init__(self, *script: Completion | Exception, answer: Answer | None = None) -> None:
        self._script = iter(script)
        self._answer = answer or (lambda _: next(self._script))
        self.blocked = ""
        self.paused_s = 0.0
        self.asked: list[tuple[list[Message], list[Mapping[str, Any]], SamplingParams, int]] = []
        self.begun = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.cancelled = asyncio.Event()
        self.first: list[Delta] = []
        self.n_at_once = 0
        self.most_at_once = 0

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        self.asked.append((copy.deepcopy(list(messages)), list(tools), sampling, max_tokens))
        self.begun.set()
        self.n_at_once += 1
        self.most_at_once = max(self.most_at_once, self.n_at_once)
        try:
            for delta in self.first if on_delta is not None else ():
                on_delta(delta)  # type: ignore[misc]
            if self.gate is not None:
                await self.gate.wait()
            answer = self._answer(messages)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.n_at_once -= 1
        if isinstance(answer, Exception):
            raise answer
        for delta in deltas(answer) if on_delta is not None and not self.first else ():
            on_delta(delta)  # type: ignore[misc]
        return answer


@dataclass
class Records:
    """Recorded calls and artefacts of a rollout."""

    calls: list[ModelCall] = field(default_factory=list)
    kept: dict[str, Artefact] = field(default_factory=dict)

    async def __call__(self, call: ModelCall) -> None:
        self.calls.append(copy.deepcopy(call))

    async def keep(self, index: int, artefact: Artefact) -> str:
        self.kept[artefact.name] = artefact
        return artefact.name


@dataclass
class Served:
    """A listening gateway, and the state behind it."""

    address: Address
    calls: GatewayCalls
    records: Records
    http: httpx2.AsyncClient
    max_retries: int

    @property
    def url(self) -> str:
        """The address without the `/v1`, as Anthropic's clients expect it."""
        return self.address.url.removesuffix("/v1")

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """The official client, imported by the tests that use it."""
        from openai import AsyncOpenAI

        address, http = self.address, self.http
        return AsyncOpenAI(base_url=address.url, api_key=address.key, max_retries=self.max_retries, http_client=http)

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """The official client of Anthropic's API."""
        from anthropic import AsyncAnthropic

        key, http = self.address.key, self.http
        return AsyncAnthropic(base_url=self.url, api_key=key, max_retries=self.max_retries, http_client=http)

    @cached_property
    def google(self) -> AsyncClient:
        """The official client of Google's API."""
        from google.genai import Client
        from google.genai.types import HttpOptions

        options = HttpOptions(base_url=self.url, httpx_async_client=self.http)
        return Client(api_key=self.address.key, http_options=options).aio

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        return await self.http.post(f"{self.url}{path}", json=dict(body))

    async def events(self, path: str, body: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return names and data of a stream's events; comments have the name `:`."""
        async with self.http.stream("POST", f"{self.url}{path}", json=dict(body)) as response:
            assert response.status_code == 200, await response.aread()
            text = (await response.aread()).decode()
        return [_event(block) for block in text.split("\n\n") if block]


def _event(block: str) -> tuple[str, str]:
    fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
    return (fields.get("event", ""), fields["data"]) if fields else (":", "")


def context_of(
    policy: Any,
    records: Records,
    sampling: SamplingParams | None = None,
    models: Mapping[str, ChatModel] = NO_MODELS,
    requests: AgentRequests | None = None,
    **limits: Any,
) -> AgentContext:
    return AgentContext(
        rollout_id="r1",
        messages=[{"role": "user", "content": "begin"}],
        tools={},
        policy=policy,
        sampling=sampling or SamplingParams(),
        limits=Limits(**limits),
        record=records,
        keep=records.keep,
        models=models,
        agent_requests=requests or AgentRequests(),
    )


@asynccontextmanager
async def served(
    policy: Any,
    *,
    sampling: SamplingParams | None = None,
    folder: Path | None = None,
    silence_s: float = 60.0,
    max_retries: int = 0,
    models: Mapping[str, ChatModel] = NO_MODELS,
    requests: AgentRequests | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    records = Records()
    calls = GatewayCalls(context_of(policy, records, sampling, models, requests, **limits))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(gateway(calls, folder, tcp=True, silence_s=silence_s))
        http = await stack.enter_async_context(httpx2.AsyncClient(trust_env=False, verify=False, timeout=60.0))
        yield Served(address, calls, records, http, max_retries)


def saying(text: str = "hello") -> Completion:
    return answering(text)
