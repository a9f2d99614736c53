"""The servers that ProRL's trainer starts for token generation: only `/generate`.

Source: verl_custom/nvidia/rollout/vllm_async_server.py of NVIDIA-NeMo/ProRL-Agent-Server. A request has `prompt_ids`
in addition to vLLM's sampling parameters, an answer `response_ids` and `logprobs`. The server lists no models, has no
health check and cannot be paused.

An answer has no finish reason: it counts as cut off if it has the maximum length, else as ended by the model. So a
generation that the trainer aborts, as when it puts its engines to sleep, looks complete: the trainer must end its jobs
first. If a server does add `finish_reason`, it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from farm.records.engine import EngineInfo
from workers.policy.engines.connection import EngineConnection
from workers.policy.engines.generation_builder import GenerationBuilder
from workers.policy.engines.kind import EngineKind, Identity
from workers.policy.engines.wire import GenerationRequest, Wire, sampling_fields
from workers.policy.generation import Generation

_DESCRIPTION = "/openapi.json"


class PromptIdsWire(Wire):
    """`/generate` with `prompt_ids`; never streamed."""

    name = "prompt_ids"
    path = "/generate"
    advice = "its /generate does not accept prompt_ids: it is not a server of ProRL's trainer"
    lacks = frozenset({"cache_salt", "routed_experts"})

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        """Return the body. It names no model: the server has only one."""
        sampling = sampling_fields(ask.sampling, ask.max_tokens)
        return {"prompt_ids": ask.prompt, "max_tokens": ask.max_tokens, **sampling}

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        new = builder.add(event["response_ids"], event["logprobs"])
        builder.n_counted = len(new)
        builder.end(event.get("finish_reason") or ("length" if builder.is_full else "stop"))
        return new


class ProrlKind(EngineKind):
    """A server whose OpenAPI description has `/generate` and no route of OpenAI's API."""

    health_paths: ClassVar[Sequence[str]] = ("/health", _DESCRIPTION)

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        if card:
            return None
        routes = (await connection.get_object(_DESCRIPTION)).get("paths")
        if not isinstance(routes, Mapping) or "/generate" not in routes or "/v1/chat/completions" in routes:
            return None
        return Identity(notes=("it lists neither its model nor its context length: name the model and its tokenizer",))

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (PromptIdsWire(),)

    def remarks(self, first: Generation) -> Iterable[str]:
        yield "its answers have no finish reason: aborted answers look complete"
