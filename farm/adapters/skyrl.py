"""SkyRL: a generator whose trajectories the farm plays, plain or step-wise.

    class FarmExp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return FarmGenerator(client, cfg.generator, run="exp-1", vocabulary=len(tokenizer))

Plain, each trajectory is one row. Step-wise (`generator.step_wise_trajectories`), each of its segments is a row, those
of a trajectory next to each other, with its reward on the last. SkyRL has no slot for a trajectory without a reward,
and takes the mean of a group over all of its rows: see `farm.adapters.single_row` for what a broken one becomes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import BrokenRollouts, RowLimits, StepRow, TooLong, rows_of_step, single_rows
from farm.adapters.step_checks import check_count
from farm.adapters.stop_reasons import reason_table
from farm.adapters.trainer_step import Phase, TrainerRun, instance_of
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.request import Instance, SamplingParams
from farm.records.rollout import Outcome, Rollout
from farm.records.trajectory import Segment

STOP_REASONS = reason_table(
    ended="stop",
    cut="length",
    broken="error",
    aborted="abort",
    named={
        Outcome.MAX_TURNS: "max_turns",
        Outcome.CONTEXT_FULL: "context_length",
        Outcome.DEADLINE: "agent_timeout",
    },
)
"""SkyRL's `apply_overlong_filtering` masks every row whose reason is not `stop`."""
_SAMPLING = {"max_generate_length": "max_tokens", "max_tokens": "max_tokens", "seed": "seed", "stop": "stop"} | {
    name: name for name in ("temperature", "top_p", "top_k")
}
"""SkyRL's sampling parameters and ours; others are the engine's defaults, and are refused where they differ."""
_DEFAULTS = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_IGNORED = {"logprobs", "additional_kwargs", "include_stop_str_in_output", "skip_special_tokens"}
"""The form of answers, which the farm decides itself."""


class SkyRLAdapter:
    """Rows as a plain `GeneratorOutput` has them: lists by key, one entry for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> dict[str, Any]:
        """Return the rows of the rollouts that may train; `FarmGenerator` has placeholders for the others."""
        output = _empty()
        for rollout, segment in single_rows(rollouts, min_version):
            _append(output, rollout, segment, float(rollout.reward or 0.0))
        return output

    def read(self, rows: Mapping[str, Any], /) -> list[TrainingRow]:
        """Return the rows as plain values; a reward that is on tokens is their sum."""
        names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
        columns = zip(*(rows[name] for name in names), strict=True)
        return [
            TrainingRow(tuple(prompt), tuple(ids), tuple(mask), tuple(logprobs), _reward(reward))
            for prompt, ids, mask, logprobs, reward in columns
        ]


rows = SkyRLAdapter()


def _reward(value: Any) -> float:
    return float(sum(value)) if isinstance(value, list) else float(value)


@dataclass
class FarmGenerator:
    """SkyRL's `GeneratorInterface`. `generator_cfg` is its `cfg.generator`.

    `instance(env_extras)` gives a prompt's instance; without it, the data set's column `farm_instance` holds it.
    `max_seq_len` is the trainer's (`cfg.trainer.algorithm.max_seq_len`), `vocabulary` the size of its own; `settings`
    are further fields of `BatchRequest`.
    """

    client: Farm
    generator_cfg: Any
    run: str
    instance: Callable[[Mapping[str, Any]], Instance] = instance_of
    broken: BrokenRollouts = "neutral"
    too_long: TooLong = "error"
    max_seq_len: int | None = None
    vocabulary: int | None = None
    settings: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self._run = TrainerRun(self.client, self.run, self.settings or {}, self.timeout_s)

    @property
    def step_wise(self) -> bool:
        return bool(getattr(self.generator_cfg, "step_wise_trajectories", False))

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Play every prompt of the batch; return SkyRL's `GeneratorOutput`, in the batch's order."""
        extras, trajectory_ids = input_batch.get("env_extras"), input_batch.get("trajectory_ids")
        if extras is None:
            raise InvalidRequest("the data set has no column beside the prompt, so no instance", field="env_extras")
        if self.step_wise and trajectory_ids is None:
            raise InvalidRequest("step-wise rows are told apart by it, and it is missing", field="trajectory_ids")
        listed = [self.instance(each) for each in extras]
        metadata = input_batch.get("batch_metadata")
        step = 0 if metadata is None else int(metadata.global_step)
        phase: Phase = "eval" if metadata is not None and metadata.training_phase == "eval" else "train"
        sampling = sampling_params(input_batch.get("sampling_params") or {})
        changed = {} if sampling is None else {"sampling": sampling}
        rollouts = await asyncio.to_thread(self._run.play, listed, step, phase, **changed)
        check_count(len(rollouts), len(input_batch["prompts"]))
        return self._output(rollouts, trajectory_ids)

    def _output(self, rollouts: Sequence[Rollout], trajectory_ids: Sequence[Any] | None) -> dict[str, Any]:
        limits = RowLimits(
            total_tokens=self.max_seq_len,
            vocabulary=self.vocabulary,
            too_long=self.too_long,
            total_option="max_seq_len",
        )
        step_rows = rows_of_step(rollouts, broken=self.broken, limits=limits, every_segment=self.step_wise)
        output = _empty()
        if self.step_wise:
            assert trajectory_ids is not None
            output |= {"trajectory_ids": [], "is_last_step": []}
            for row, trajectory_id in zip(step_rows, trajectory_ids, strict=True):
                _append_steps(output, row, trajectory_id)
        else:
            for row in step_rows:
                _append(output, row.rollout, row.segments[0], row.reward)
            output["trajectory_ids"] = None if trajectory_ids is None else list(trajectory_ids)
        return output | {"rollout_metrics": _metrics(step_rows)}


def sampling_params(values: Mapping[str, Any]) -> SamplingParams | None:
    """Return SkyRL's sampling parameters as ours; None if there are none. Raises InvalidRequest naming one we lack."""
    ours: dict[str, Any] = {}
    for name, value in values.items():
        if name in _IGNORED or value is None or _DEFAULTS.get(name) == value:
            continue
        if name not in _SAMPLING:
            raise InvalidRequest(f"the farm has no such parameter (it is {value!r})", field=f"sampling_params.{name}")
        ours[_SAMPLING[name]] = tuple(value) if name == "stop" else value
    return SamplingParams(**ours) if ours else None


def _empty() -> dict[str, Any]:
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    absent = ("rollout_expert_indices", "trajectory_generation_times", "trajectory_time_splits", "env_metrics")
    return {
        **{name: [] for name in names},
        **dict.fromkeys((*absent, "pixel_values", "image_grid_thw", "trajectory_ids", "is_last_step"), None),
        "rollout_metrics": None,
    }


def _append(output: dict[str, Any], rollout: Rollout, segment: Segment, reward: float) -> None:
    output["prompt_token_ids"].append(segment.prompt_ids.tolist())
    output["response_ids"].append(segment.response_ids.tolist())
    output["rewards"].append(reward)
    output["loss_masks"].append(segment.response_mask.tolist())
    output["stop_reasons"].append("abort" if rollout.outcome is None else STOP_REASONS[rollout.outcome])
    output["rollout_logprobs"].append(segment.response_logprobs.tolist())


def _append_steps(output: dict[str, Any], row: StepRow, trajectory_id: Any) -> None:
    """Append the segments of a rollout as its steps: next to each other, the reward on the last alone."""
    *_, last = range(len(row.segments))
    for index, segment in enumerate(row.segments):
        _append(output, row.rollout, segment, row.reward if index == last else 0.0)
        output["trajectory_ids"].append(trajectory_id)
        output["is_last_step"].append(index == last)


def _metrics(step_rows: Sequence[StepRow]) -> dict[str, float]:
    """Return means over the scored rollouts alone, and how many there were not."""
    scored = [row.rollout for row in step_rows if row.scored]
    n = max(len(scored), 1)
    return {
        "farm/n_unscored": float(sum(not row.scored for row in step_rows)),
        "farm/avg_n_turns": sum(each.n_turns for each in scored) / n,
        "farm/mean_reward": sum(each.reward or 0.0 for each in scored) / n,
    }
