"""verl's rows: the fields of its `AgentLoopOutput`. The agent loop manager is `farm.adapters.verl_agent_loops`.

verl's V0 trainer takes one row for each sample, its V1 trainer one or several. Both sum the reward over a row's tokens;
the reward stands on the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import single_rows
from farm.adapters.stop_reasons import reason_table
from farm.adapters.trainer_sampling import TrainerSampling, limits_of, refuse_options
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment

STOP_REASONS = reason_table(ended="completed", cut="length", broken="error", aborted="aborted")
"""verl's words for the end of a call; a row has no field for it, so it is `farm_stop_reason` of the extra fields."""
_SAMPLING = TrainerSampling("actor_rollout_ref.rollout")
_ROLLOUT = "actor_rollout_ref.rollout."
_OBSERVATION_CHARS = 256
"""verl's default of `max_tool_response_length`, by which no limit is set."""
MAPPED = frozenset(
    {
        *("temperature", "top_p", "top_k", "val_kwargs", "full_determinism", "seed"),
        *("prompt_length", "response_length", "max_model_len"),
        *("multi_turn.max_assistant_turns", "multi_turn.max_user_turns", "multi_turn.max_tool_response_length"),
    }
)
"""The options of verl's `actor_rollout_ref.rollout` that the farm's rollouts follow."""
REFUSED = {
    "ignore_eos": "the farm's rollouts end where the policy ends them",
    "over_sample_rate": "verl's own loops abort what is left of a batch: have a StepCollector of the farm collect it",
    "enable_rollout_routing_replay": "the experts that a token was routed to are not recorded",
    "multi_turn.tool_config_path": "tools are those of the farm's handler",
    "multi_turn.function_tool_path": "tools are those of the farm's handler",
    "multi_turn.tool_response_truncate_side": "long outputs of tools are cut in the middle",
    "multi_turn.num_repeat_rollouts": "`n` says how many rollouts a prompt has",
}
"""Options of which the farm can serve the default alone, with the reason."""
_UNCHANGED = {
    "ignore_eos": False,
    "over_sample_rate": 0,
    "enable_rollout_routing_replay": False,
    "multi_turn.tool_response_truncate_side": "middle",
}


class VerlAdapter:
    """Rows as keyword arguments of verl's `AgentLoopOutput`, one for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that may train; the manager has placeholders for the others, where needed."""
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
    options = {_ROLLOUT + name: _option(config, name) for name in REFUSED}
    unchanged = {_ROLLOUT + name: value for name, value in _UNCHANGED.items()}
    refuse_options(options, unchanged, {_ROLLOUT + name: reason for name, reason in REFUSED.items()})


def rollout_request(config: Any, settings: Mapping[str, Any], *, validate: bool) -> dict[str, Any]:
    """Return the fields of a batch that verl's rollout configuration gives, but for those that the `settings` give."""
    source = config.val_kwargs if validate else config
    sampled = {name: getattr(source, name) for name in ("temperature", "top_p", "top_k")}
    if _option(config, "full_determinism"):
        sampled["seed"] = config.seed
    chars, n_user = _option(config, "multi_turn.max_tool_response_length"), _option(config, "multi_turn.max_user_turns")
    turns = (_option(config, "multi_turn.max_assistant_turns"), None if n_user is None else n_user + 1)
    limits = limits_of(
        settings,
        max_turns=min((each for each in turns if each), default=None),
        max_tokens=config.response_length,
        max_response_tokens=config.response_length,
        max_row_tokens=min(config.prompt_length + config.response_length, _option(config, "max_model_len") or 2**31),
        max_observation_chars=None if chars == _OBSERVATION_CHARS else chars,
    )
    fields = {"sampling": _SAMPLING.params({**sampled, "repetition_penalty": 1.0})}
    return {name: value for name, value in fields.items() if name not in settings} | {"limits": limits}


def _option(config: Any, path: str) -> Any:
    value = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def output_fields(rollout: Rollout, segment: Segment, reward: float) -> dict[str, Any]:
    """Return the fields of an `AgentLoopOutput`; its metrics are verl's own zeros, as no call of verl's was made.

    `min_global_steps` and `max_global_steps`, by which verl drops what is too old, are the versions of the row, where
    its weights have numbers. They are those of verl's steps if the engines' weights are named by them. verl counts the
    turns of both sides.
    """
    oldest, newest = segment.version_span
    return {
        "prompt_ids": segment.prompt_ids.tolist(),
        "response_ids": segment.response_ids.tolist(),
        "response_mask": segment.response_mask.tolist(),
        "response_logprobs": segment.response_logprobs.tolist(),
        "reward_score": reward,
        "num_turns": 2 * rollout.n_turns,
        "metrics": {},
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": None if oldest == NO_VERSION else oldest,
            "max_global_steps": None if newest == NO_VERSION else newest,
            "reward_extra_info": {"acc": reward},
            "farm_rollout_id": rollout.rollout_id,
            "farm_outcome": str(rollout.outcome or ""),
            "farm_stop_reason": "aborted" if rollout.outcome is None else STOP_REASONS[rollout.outcome],
        },
    }
