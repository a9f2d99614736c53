"""The two wires of vLLM that take token ids.

`/inference/v1/generate` is the better: ids and log-probabilities side by side and the weight version of every token.
It needs `--enable-scale-out`. `/v1/completions` is always there; before vLLM 0.33 it tells no weight versions, so its
spans stay empty and a call that crossed an update cannot be told from one that did not.
Log-probabilities come from before temperature and filters unless the server runs with another `--logprobs-mode`.
"""

from __future__ import annotations

from typing import Any

from workers.policy.engines.intake import Intake
from workers.policy.engines.wire import Ask, sampling_fields

_AS_ID = "token_id:"
"""With `return_tokens_as_token_ids` a log-probability names its token so, and can be checked against the ids."""


class GenerateWire:
    """`/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Nothing is made into text unless stop strings need it; this is most of what a busy server front does."""
        sampling = sampling_fields(ask.sampling) | {"max_tokens": ask.max_tokens, "logprobs": 0}
        if not ask.sampling.stop:
            sampling["detokenize"] = False
        body = {"model": ask.model, "token_ids": ask.prompt, "sampling_params": sampling, "return_token_ids": True}
        return body | _streaming(ask)

    def take(self, event: dict[str, Any], intake: Intake) -> list[int]:
        intake.saw(event.get("prompt_token_ids"))
        _count(event, intake)
        new: list[int] = []
        for choice in event["choices"][:1]:
            new = _choice(choice, intake)
            entries = (choice.get("logprobs") or {}).get("content") or []
            intake.logprobs += [entry["logprob"] for entry in entries]
            intake.logprob_ids += [entry["token_id"] for entry in entries]
        return new


class CompletionsWire:
    """`/v1/completions`, as vLLM extends it."""

    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {"model": ask.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "logprobs": 0}
        asked = ("return_token_ids", "return_tokens_as_token_ids", "return_weight_versions")
        return body | dict.fromkeys(asked, True) | sampling_fields(ask.sampling) | _streaming(ask)

    def take(self, event: dict[str, Any], intake: Intake) -> list[int]:
        _count(event, intake)
        new: list[int] = []
        for choice in event["choices"][:1]:
            intake.saw(choice.get("prompt_token_ids"))
            new = _choice(choice, intake)
            logprobs = choice.get("logprobs") or {}
            intake.logprobs += logprobs.get("token_logprobs") or []
            named = [name for name in logprobs.get("tokens") or [] if name.startswith(_AS_ID)]
            intake.logprob_ids += [int(name.removeprefix(_AS_ID)) for name in named]
        return new


def _streaming(ask: Ask) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if ask.stream else {}


def _choice(choice: dict[str, Any], intake: Intake) -> list[int]:
    new: list[int] = choice.get("token_ids") or []
    intake.ids += new
    intake.finish_reason = choice.get("finish_reason") or intake.finish_reason
    stop_reason = choice.get("stop_reason")
    intake.stop_reason = intake.stop_reason if stop_reason is None else stop_reason
    intake.spans(choice.get("weight_versions"))
    return new


def _count(event: dict[str, Any], intake: Intake) -> None:
    usage = event.get("usage")
    if usage:
        intake.n_counted = usage["completion_tokens"]
        intake.n_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
