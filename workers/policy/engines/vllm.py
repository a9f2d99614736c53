"""vLLM: its two token wires, its control, and its detection.

`/inference/v1/generate` is the better one: ids and log-probabilities together, and the weight version of every token.
It needs `--enable-scale-out`. `/v1/completions` always exists; before vLLM 0.33 it gives no weight versions, so its
spans stay empty and a call that crossed an update cannot be distinguished from others.
Log-probabilities are taken before temperature and filters unless the server runs with another `--logprobs-mode`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from farm.errors import EngineError
from farm.records.engine import BRIDGE_OWNER, EngineInfo, PauseMode
from workers.policy.answer_form import guide_of
from workers.policy.engines.connection import EngineConnection, Refusal
from workers.policy.engines.generation_builder import GenerationBuilder, from_npy
from workers.policy.engines.kind import NO_ROUTE, EngineKind, HttpControl, Identity, NoControl
from workers.policy.engines.wire import GenerationRequest, Wire, salted, sampling_fields
from workers.policy.generation import Control, Generation

_DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1 to let the farm pause it and name its weights"
_CACHED = "start vLLM with --enable-prompt-tokens-details to see prefix-cache hits"

_AS_ID = "token_id:"
"""The prefix of tokens under `return_tokens_as_token_ids`, which lets log-probabilities be checked against ids."""


class GenerateWire(Wire):
    """`/inference/v1/generate`."""

    name = "generate"
    path = "/inference/v1/generate"
    takes_guides = True
    advice = "start vLLM with --enable-scale-out: its /inference/v1/generate reports every token's weight version"

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        """Return the body; detokenization, most of a busy frontend's work, is disabled unless stop strings need it."""
        sampling = sampling_fields(ask.sampling, ask.max_tokens) | {"max_tokens": ask.max_tokens, "logprobs": 0}
        if not ask.sampling.stop:
            sampling["detokenize"] = False
        sampling |= _guided(ask) | _experts_from(ask)
        body = {"model": ask.model, "token_ids": ask.prompt, "sampling_params": sampling, "return_token_ids": True}
        return body | salted(ask.sampling) | _streaming(ask)

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        builder.saw(event.get("prompt_token_ids"))
        _count(event, builder)
        new: list[int] = []
        for choice in event["choices"][:1]:
            entries = (choice.get("logprobs") or {}).get("content") or []
            logprobs, of = [entry["logprob"] for entry in entries], [entry["token_id"] for entry in entries]
            new = builder.add(choice.get("token_ids"), logprobs, of)
            _end(choice, builder)
        return new


class CompletionsWire(Wire):
    """`/v1/completions` with vLLM's extensions."""

    name = "completions"
    path = "/v1/completions"
    takes_guides = True
    advice = "it does not accept token ids on /v1/completions: rollouts on it are text only and cannot be trained on"
    streams_experts = False

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        body = {"model": ask.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "logprobs": 0}
        flags = ("return_token_ids", "return_tokens_as_token_ids", "return_weight_versions")
        sampling = sampling_fields(ask.sampling, ask.max_tokens) | salted(ask.sampling)
        return body | dict.fromkeys(flags, True) | sampling | _guided(ask) | _experts_from(ask) | _streaming(ask)

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        _count(event, builder)
        new: list[int] = []
        for choice in event["choices"][:1]:
            builder.saw(choice.get("prompt_token_ids"))
            logprobs = choice.get("logprobs") or {}
            named = [name for name in logprobs.get("tokens") or [] if name.startswith(_AS_ID)]
            of = [int(name.removeprefix(_AS_ID)) for name in named]
            new = builder.add(choice.get("token_ids"), logprobs.get("token_logprobs"), of)
            _end(choice, builder)
        return new


def _guided(ask: GenerationRequest) -> dict[str, Any]:
    """Return the guide in the form that vLLM accepts since 0.11."""
    guide = guide_of(ask.sampling)
    if "json_schema" in guide:
        return {"structured_outputs": {"json": guide["json_schema"]}}
    return {"structured_outputs": {"structural_tag": json.dumps(guide["structural_tag"])}} if guide else {}


def _experts_from(ask: GenerationRequest) -> dict[str, Any]:
    """Return the first position whose experts are requested; only a flag of the server enables them."""
    return {"routed_experts_prompt_start": ask.experts.start} if ask.experts is not None else {}


def _streaming(ask: GenerationRequest) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if ask.stream else {}


def _end(choice: dict[str, Any], builder: GenerationBuilder) -> None:
    builder.end(choice.get("finish_reason"), choice.get("stop_reason"))
    builder.spans(choice.get("weight_versions"))
    builder.take_experts(choice.get("routed_experts"), from_npy)


def _count(event: dict[str, Any], builder: GenerationBuilder) -> None:
    usage = event.get("usage")
    if usage:
        builder.n_counted = usage["completion_tokens"]
        builder.n_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class VllmControl(HttpControl):
    """Endpoints that vLLM enables with VLLM_SERVER_DEV_MODE=1."""

    advice = "start vLLM with VLLM_SERVER_DEV_MODE=1 to let the farm pause it"
    modes: ClassVar[Mapping[PauseMode, str]] = {"drain": "wait", "keep": "keep", "abort": "abort"}
    version_path = "/weight_info"

    async def pause(self, mode: PauseMode) -> None:
        await self._call("POST", f"/pause?mode={self.modes[mode]}")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def set_version(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def load_weights(self, path: str) -> None:
        await self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self._call("POST", "/reset_prefix_cache?reset_running_requests=true")

    async def paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused")).get("is_paused"))


class VllmKind(EngineKind):
    """vLLM, recognised by the owner in its list of models."""

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        """Implement `EngineKind.identify`. Raises EngineError if it is paused, as nothing can be sampled then.

        Only a refusal of the route shows that it has no control. If it is busy or slow, the check is repeated.
        """
        if not str(card.get("owned_by") or "").startswith("vllm"):
            return None
        version = str((await connection.get_object("/version")).get("version") or "")
        try:
            answer = await connection.get("/is_paused")
        except Refusal as refusal:
            if refusal.status not in NO_ROUTE:
                raise
            return Identity(version, notes=(_DEV_MODE,))
        if isinstance(answer, dict) and answer.get("is_paused"):
            raise EngineError(f"engine {connection.url} is paused and samples nothing; resume it, then probe it again")
        return Identity(version, control=True)

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (GenerateWire(), CompletionsWire())

    def control(self, info: EngineInfo, connection: EngineConnection) -> Control:
        if info.control:
            return VllmControl(connection)
        return NoControl(connection.url, "; or start vLLM with VLLM_SERVER_DEV_MODE=1")

    def remarks(self, first: Generation) -> Iterator[str]:
        if first.n_cached_tokens is None:
            yield _CACHED


class BridgeKind(EngineKind):
    """A trainer's own engine behind `farm.adapters.engine_bridge`: it uses vLLM's wire and accepts no orders."""

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        return Identity() if card.get("owned_by") == BRIDGE_OWNER else None

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (GenerateWire(),)
