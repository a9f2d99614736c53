"""llama.cpp's server as an engine kind: `/completion` takes token ids, and returns ids with log-probabilities.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (POST /completion, GET /props)

It is always called with a stream: a non-streamed answer lacks the log-probabilities of a stop string. Both forms lack a
token after which the text ends within a UTF-8 character: then the ids do not match the number of sampled tokens, so the
answer is refused and sampled again. Log-probabilities are those of the model itself, before temperature and filters.
The server supports neither a pause nor naming its weights: the farm holds its own calls back, and counts its own
version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.engine import EngineInfo
from workers.policy.engines.connection import EngineConnection
from workers.policy.engines.generation_builder import GenerationBuilder
from workers.policy.engines.kind import EngineKind, Identity
from workers.policy.engines.wire import SHORT_SEED, GenerationRequest, Wire, sampling_fields

_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""Sampling from the model itself: the server's defaults cut its tail, which the log-probabilities do not reflect."""
_FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


class CompletionWire(Wire):
    """`/completion`, the server's own route; `/v1/completions` returns no ids."""

    name = "completion"
    path = "/completion"
    advice = "its /completion takes no token ids: rollouts on it are text only and cannot be trained on"
    lacks = frozenset({"min_tokens", "stop_token_ids", "cache_salt"})
    always_streams = True
    ends_with_done = False

    def body(self, ask: GenerationRequest) -> dict[str, Any]:
        """Return the body. It names no model, as the server has only one."""
        sampling = _NEUTRAL | sampling_fields(ask.sampling, ask.max_tokens, repetition_penalty="repeat_penalty")
        if "seed" in sampling:
            sampling["seed"] &= SHORT_SEED
        return {"prompt": ask.prompt, "n_predict": ask.max_tokens, "n_probs": 1, "stream": True} | sampling

    def take(self, event: dict[str, Any], builder: GenerationBuilder) -> list[int]:
        """Add the ids of an event; the last event has none, but their total number."""
        entries = event.get("completion_probabilities") or []
        new = builder.add(event["tokens"], [each["logprob"] for each in entries], [each["id"] for each in entries])
        if event["stop"]:
            builder.n_counted = event["tokens_predicted"]
            builder.n_cached_tokens = event["timings"].get("cache_n")
            builder.end(_FINISH_REASONS[event["stop_type"]], event["stopping_word"] or None)
        return new


class LlamaCppKind(EngineKind):
    """llama.cpp's server, recognized by the owner in its list of models."""

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        if card.get("owned_by") != "llamacpp":
            return None
        properties = await connection.get_object("/props")
        settings = properties.get("default_generation_settings") or {}
        return Identity(
            str(properties.get("build_info") or ""),
            context_tokens=settings.get("n_ctx"),
            notes=("its model is a GGUF file: name the tokenizer that the farm is to use, with --tokenizer",),
        )

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        return (CompletionWire(),)
