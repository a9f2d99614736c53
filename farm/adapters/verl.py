"""verl's rows: the fields of its `AgentLoopOutput`. The agent loop manager is `farm.adapters.verl_agent_loops`.

verl's V0 trainer takes one row for each sample, its V1 trainer one or several. Both sum the reward over a row's tokens;
the reward stands on the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from farm.adapters.engine_bridge import EngineBridge, SampledByTrainer, known_parameters
from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import reason_table, replayed, single_rows
from farm.adapters.trainer_sampling import TrainerSampling, limits_of, option, refuse_options
from farm.errors import InvalidRequest
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment

STOP_REASONS = reason_table(ended="completed", cut="length", broken="error", aborted="aborted")
"""verl's words for the end of a call; a row has no field for it, so it is `farm_stop_reason` of the extra fields."""
_SAMPLING = TrainerSampling("actor_rollout_ref.rollout")
_ROLLOUT = "actor_rollout_ref.rollout."
_REPLAY = "enable_rollout_routing_replay"
ROUTING_REPLAY = _ROLLOUT + _REPLAY
_OBSERVATION_CHARS = 256
"""verl's default of `max_tool_response_length`, which means no limit."""
_SGLANG_NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
"""SGLang's names of sampling parameters, if they differ from vLLM's."""
MAPPED = frozenset(
    {
        *("temperature", "top_p", "top_k", "val_kwargs", "full_determinism", "seed"),
        *("prompt_length", "response_length", "max_model_len"),
        *("multi_turn.max_assistant_turns", "multi_turn.max_user_turns", "multi_turn.max_tool_response_length"),
        "enable_rollout_routing_replay",
    }
)
"""The options of verl's `actor_rollout_ref.rollout` that the farm's rollouts follow."""
REFUSED = {
    "ignore_eos": "the farm's rollouts end where the policy ends them",
    "over_sample_rate": "verl's own loops abort what is left of a batch: have a StepCollector of the farm collect it",
    "multi_turn.tool_config_path": "tools are those of the farm's handler",
    "multi_turn.function_tool_path": "tools are those of the farm's handler",
    "multi_turn.tool_response_truncate_side": "long outputs of tools are cut in the middle",
    "multi_turn.num_repeat_rollouts": "`n` says how many rollouts a prompt has",
}
"""Options that must keep their default, with the reason."""
_UNCHANGED = {
    "ignore_eos": False,
    "over_sample_rate": 0,
    "multi_turn.tool_response_truncate_side": "middle",
}


class VerlAdapter:
    """Rows as keyword arguments of verl's `AgentLoopOutput`, one for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that may train; the manager adds placeholders where needed."""
        return [
            output_fields(rollout, segment, float(rollout.reward or 0.0))
            for rollout, segment in single_rows(rollouts, min_version)
        ]

    def read(self, rows: Sequence[Mapping[str, Any]], /) -> list[TrainingRow]:
        """Return the rows as plain values."""
        return [
            TrainingRow(
                tuple(row["prompt_ids"]),
                tuple(row["response_ids"]),
                tuple(row["response_mask"]),
                tuple(row["response_logprobs"]),
                row["reward_score"],
                rollout_id=row["extra_fields"]["farm_rollout_id"],
            )
            for row in rows
        ]


rows = VerlAdapter()


def check_rollout_config(config: Any) -> None:
    """Raise InvalidRequest for an option of `actor_rollout_ref.rollout` that the farm's rollouts cannot follow."""
    options = {_ROLLOUT + name: option(config, name) for name in REFUSED}
    unchanged = {_ROLLOUT + name: value for name, value in _UNCHANGED.items()}
    refuse_options(options, unchanged, {_ROLLOUT + name: reason for name, reason in REFUSED.items()})


def experts_form(config: Any) -> tuple[int, int] | None:
    """Return (layers of verl's model, experts per token); None if routing is not replayed.

    Raises InvalidRequest for a model without experts.
    """
    if not option(config.actor_rollout_ref.rollout, _REPLAY):
        return None
    from transformers import AutoConfig  # type: ignore[import-not-found, unused-ignore]
    from verl.utils.fs import copy_to_local

    model = config.actor_rollout_ref.model
    trusted = bool(getattr(model, "trust_remote_code", False))
    text = AutoConfig.from_pretrained(copy_to_local(model.path), trust_remote_code=trusted).get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not top_k:
        raise InvalidRequest(f"the model {model.path} has no experts to replay", field=ROUTING_REPLAY)
    return text.num_hidden_layers, top_k


def rollout_request(
    config: Any, settings: Mapping[str, Any], *, validate: bool, experts: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the fields of a batch from verl's rollout configuration, except those in the `settings`.

    `experts` are those of `experts_form`; an evaluation replays none.
    """
    source = config.val_kwargs if validate else config
    sampled = {name: getattr(source, name) for name in ("temperature", "top_p", "top_k")}
    if experts is not None and not validate:
        sampled["routed_experts"] = experts[1]
    if option(config, "full_determinism"):
        sampled["seed"] = config.seed
    chars, n_user = option(config, "multi_turn.max_tool_response_length"), option(config, "multi_turn.max_user_turns")
    turns = (option(config, "multi_turn.max_assistant_turns"), None if n_user is None else n_user + 1)
    limits = limits_of(
        settings,
        max_turns=min((each for each in turns if each), default=None),
        max_tokens=config.response_length,
        max_response_tokens=config.response_length,
        max_row_tokens=min(config.prompt_length + config.response_length, option(config, "max_model_len") or 2**31),
        max_observation_chars=None if chars == _OBSERVATION_CHARS else chars,
    )
    fields = {"sampling": _SAMPLING.params({**sampled, "repetition_penalty": 1.0})}
    return {name: value for name, value in fields.items() if name not in settings} | {"limits": limits}


def output_fields(rollout: Rollout, segment: Segment, reward: float) -> dict[str, Any]:
    """Return the fields of an `AgentLoopOutput`; its metrics are verl's zeros, as verl itself made no call.

    `min_global_steps` and `max_global_steps`, by which verl drops stale rows, are the versions of the row, if they have
    numbers. They equal verl's steps if the engines' weights are named by them. verl counts the turns of both sides.
    """
    oldest, newest = segment.version_span
    experts = replayed(segment)
    return {
        # verl's own type for them
        **({} if experts is None else {"routed_experts": experts.astype(np.int16)}),
        "prompt_ids": segment.prompt_ids.tolist(),
        "response_ids": segment.response_ids.tolist(),
        "response_mask": segment.response_mask.tolist(),
        "response_logprobs": segment.response_logprobs.tolist(),
        "reward_score": reward,
        "num_turns": 2 * rollout.n_turns,
        "metrics": {},
        "extra_fields": {
            "turn_scores": [turn_reward for _, turn_reward in segment.turn_rewards],
            "tool_rewards": [],
            "min_global_steps": None if oldest == NO_VERSION else oldest,
            "max_global_steps": None if newest == NO_VERSION else newest,
            "reward_extra_info": {"acc": reward},
            "farm_rollout_id": rollout.rollout_id,
            "farm_outcome": str(rollout.outcome or ""),
            "farm_stop_reason": "aborted" if rollout.outcome is None else STOP_REASONS[rollout.outcome],
        },
    }


def bridge_of(llm_client: Any, config: Any) -> EngineBridge:
    """Return a bridge to verl's servers, through verl's load-balancing client; `config` is `actor_rollout_ref`."""
    rollout = config.rollout
    names = _SGLANG_NAMES if rollout.name == "sglang" else {}

    async def generate(prompt_ids: list[int], sampling: dict[str, Any], session: str) -> SampledByTrainer:
        # the farm decodes, and verl clears its caches with each update
        known = known_parameters(sampling, ("detokenize", "cache_salt"), ("structured_outputs",))
        most = int(sampling["max_tokens"])
        output = await llm_client.generate(
            session or uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params={names.get(name, name): value for name, value in known.items()} | {"logprobs": True},
        )
        extra = output.extra_fields
        version = extra.get("min_global_steps", extra.get("global_steps"))
        ended = "length" if len(output.token_ids) >= most else "stop"
        return SampledByTrainer(
            output.token_ids,
            output.log_probs or [],
            "abort" if output.stop_reason in ("abort", "aborted") else ended,
            "" if version is None else str(version),
            routed_experts=output.routed_experts,
        )

    longest = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    tokenizer = str(config.model.get("tokenizer_path") or config.model.path)
    return EngineBridge(generate, tokenizer, context_tokens=longest)


def padded_experts(fields: Sequence[Mapping[str, Any]], n_prompt: int, width: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the experts of rows whose prompts are padded on the left to `n_prompt`; nothing if they have none."""
    of_rows = [each["routed_experts"] for each in fields if "routed_experts" in each]
    if not of_rows:
        return {}
    experts = np.zeros((len(fields), width, *of_rows[0].shape[1:]), np.int16)
    for index, (each, value) in enumerate(zip(fields, of_rows, strict=True)):
        begin = n_prompt - len(each["prompt_ids"])
        experts[index, begin : begin + len(value)] = value
    return {"routed_experts": experts}
