"""SGLang: its token wire `/generate`, its control, and its detection.

Log-probabilities are taken after temperature unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB. Each event of
a stream repeats all ids so far or, with `--incremental-streaming-output`, has only the new ones; the count of tokens
shows which. In a stream, an abort carries a status, as the HTTP status has already been sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx2
import orjson

from farm.records.engine import EngineInfo, PauseMode
from farm.records.trajectory import VersionSpan
from workers.policy.answer_form import guide_of
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal
from workers.policy.engines.generation_builder import GenerationBuilder, count, from_int32, version
from workers.policy.engines.kind import EngineKind, HttpControl, Identity, NoControl
from workers.policy.engines.wire import SHORT_SEED, GenerationRequest, Wire, salted, sampling_fields
from workers.policy.generation import Control

_POLL_S = 0.2


class SglangWire(Wire):
    """`/generate`. `model` is the server's own model; any other name requests an adapter."""

    name = "sglang"
    path = "/generate"
    takes_guides = True
    advice = "its /generate does not accept token ids: rollouts on it are text only and cannot be trained on"

    def __init__(self, model: str = "") -> None:
        self._model = model

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        sampling = sampling_fields(ask.sampling, ask.max_tokens, seed="sampling_seed", min_tokens="min_new_tokens")
        sampling["max_new_tokens"] = ask.max_tokens
        if "sampling_seed" in sampling:
            sampling["sampling_seed"] &= SHORT_SEED
        if sampling.get("top_k") == 0:
            # In vLLM, 0 stands for all tokens; in SGLang, -1 does.
            sampling["top_k"] = -1
        # Each is JSON text.
        sampling |= {name: json.dumps(value) for name, value in guide_of(ask.sampling).items()}
        options: dict[str, Any] = {"return_logprob": True, "return_prompt_token_ids": True, "stream": ask.stream}
        adapter = {} if ask.model in ("", self._model) else {"lora_path": ask.model}
        salt = salted(ask.sampling, "extra_key")
        if ask.experts is not None:
            options |= {"return_routed_experts": True, "routed_experts_start_len": ask.experts.start}
        return {"input_ids": ask.prompt, "sampling_params": sampling} | options | adapter | salt

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        meta = event["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and reason.get("status_code"):
            raise Refusal(int(reason["status_code"]), httpx2.Headers(), orjson.dumps(reason))
        n = count(meta["completion_tokens"])
        builder.saw(event.get("prompt_token_ids"))
        entries = meta.get("output_token_logprobs") or []
        new = builder.add(
            _new(builder.ids, event["output_ids"], n),
            _new(builder.logprobs, [entry[0] for entry in entries], n),
            _new(builder.logprob_ids, [entry[1] for entry in entries], n),
        )
        builder.n_counted = n
        builder.n_cached_tokens = meta.get("cached_tokens")
        if reason:
            builder.end(reason["type"], reason.get("matched"))
        builder.take_experts(meta.get("routed_experts"), from_int32)
        _versions(meta, builder)
        return new


def _new(so_far: list[Any], values: Any, n: int) -> Any:
    """Return the new ones of `values`, which has all `n` so far or only these. Raises ValueError if any changed."""
    if type(values) is not list or len(values) != n or not so_far:
        return values
    if values[: len(so_far)] != so_far:
        raise ValueError("a stream event that contradicts earlier ones")
    return values[len(so_far) :]


def _versions(meta: dict[str, Any], builder: GenerationBuilder) -> None:
    if meta.get("weight_versions"):
        builder.spans(meta["weight_versions"])
    elif meta.get("weight_version") is not None:
        name = version(meta["weight_version"])
        builder.versions = (VersionSpan(name, 0, len(builder.ids)),) if builder.ids else ()


class SglangControl(HttpControl):
    """The endpoints of SGLang. A server with an admin key accepts them only with that key."""

    advice = "a newer SGLang has it; if the server has an admin key, register the engine with that key"
    modes: ClassVar[Mapping[PauseMode, str]] = {"drain": "in_place", "keep": "retract", "abort": "abort"}
    version_path = "/model_info"

    async def pause(self, mode: PauseMode) -> None:
        if mode == "drain":
            await self._idle()
        await self._call("POST", "/pause_generation", {"mode": self.modes[mode]})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def set_version(self, version: str) -> None:
        """Name the weights; SGLang's default would also abort all calls."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body)

    async def load_weights(self, path: str) -> None:
        await self._call("POST", "/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    async def paused(self) -> bool | None:
        return None

    async def _idle(self) -> None:
        """Wait until nothing runs, so that the cache can be flushed; new weights invalidate it anyway."""
        while True:
            try:
                await self._connection.post("/flush_cache", {})
            except Refusal as refusal:
                if refusal.status != 400:
                    raise self._failure("/flush_cache", refusal) from refusal
            except FAILURES as error:
                raise failures.broken(self._engine, error) from error
            else:
                return
            await asyncio.sleep(_POLL_S)


class SglangKind(EngineKind):
    """SGLang, recognised by its list of models or its model information."""

    # Its /health samples a token, and blocks while it is paused; /ready does not.
    health_paths = ("/ready", "/health")

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        model = await connection.get_object("/model_info")
        if card.get("owned_by") != "sglang" and "model_path" not in model:
            return None
        version = str((await connection.get_object("/server_info")).get("version") or "")
        return Identity(version, str(model.get("model_path") or ""), control=True)

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (SglangWire(info.model),)

    def control(self, info: EngineInfo, connection: EngineConnection) -> Control:
        return SglangControl(connection) if info.control else NoControl(connection.url)
