"""SGLang's `/generate`, which takes token ids.

Log-probabilities come from after temperature unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB. In a stream
each event repeats all ids so far, or with `--incremental-streaming-output` holds the new ones; the count of tokens
tells which. An abort with a status of its own stands in a stream for the HTTP status it came too late for.
"""

from __future__ import annotations

from typing import Any

from farm.trajectory import VersionSpan
from workers.policy.engines.intake import Intake
from workers.policy.engines.wire import Ask, sampling_fields


class SglangWire:
    """`/generate`. `model` is the name of the server's own model; any other asks for an adapter."""

    path = "/generate"

    def __init__(self, model: str = "") -> None:
        self._model = model

    def body(self, ask: Ask) -> dict[str, Any]:
        sampling = sampling_fields(ask.sampling, seed="sampling_seed") | {"max_new_tokens": ask.max_tokens}
        if sampling.get("top_k") == 0:
            # vLLM's word for "all of them"; SGLang's is -1.
            sampling["top_k"] = -1
        asked = {"return_logprob": True, "return_prompt_token_ids": True, "stream": ask.stream}
        adapter = {} if ask.model in ("", self._model) else {"lora_path": ask.model}
        return {"input_ids": ask.prompt, "sampling_params": sampling} | asked | adapter

    def take(self, event: dict[str, Any], intake: Intake) -> list[int]:
        meta = event["meta_info"]
        n = meta["completion_tokens"]
        intake.saw(event.get("prompt_token_ids"))
        n_before = len(intake.ids)
        intake.ids = _grown(intake.ids, event["output_ids"], n)
        entries = meta.get("output_token_logprobs") or []
        intake.logprobs = _grown(intake.logprobs, [entry[0] for entry in entries], n)
        intake.logprob_ids = _grown(intake.logprob_ids, [entry[1] for entry in entries], n)
        intake.n_counted = n
        intake.n_cached_tokens = meta.get("cached_tokens")
        _finish(meta.get("finish_reason"), intake)
        _versions(meta, intake)
        return intake.ids[n_before:]


def _grown(so_far: list[Any], found: list[Any], n: int) -> list[Any]:
    """All values, whether `found` holds all `n` of them or only the new ones."""
    return found if len(found) == n else so_far + found


def _finish(reason: dict[str, Any] | None, intake: Intake) -> None:
    if reason:
        intake.finish_reason = reason["type"]
        intake.stop_reason = reason.get("matched")


def _versions(meta: dict[str, Any], intake: Intake) -> None:
    if meta.get("weight_versions"):
        intake.spans(meta["weight_versions"])
    elif meta.get("weight_version") is not None:
        intake.versions = (VersionSpan(str(meta["weight_version"]), 0, len(intake.ids)),) if intake.ids else ()
