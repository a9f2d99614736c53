"""TRL's GRPOTrainer: a `rollout_func` and a reward function that run the trainer's steps on the farm.

    trainer = GRPOTrainer(
        ..., rollout_func=rollout_func(client, instances, run="exp-1", push=push), reward_funcs=reward_from_farm
    )

TRL takes one row for each sample. A failed rollout has a placeholder row with the reward None: TRL leaves a row without
any reward out of its group's mean and deviation and gives it advantage 0, and its mask keeps it out of the number of
tokens by which the loss is divided.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import RowLimits, StepRow, TooLong, reason_table, rows_of_step, single_rows
from farm.adapters.trainer_sampling import TrainerSampling, limits_of, refuse_options
from farm.adapters.trainer_step import Phase, TrainerRun, WeightPush, check_count
from farm.client.farm import Farm
from farm.errors import InvalidRequest
from farm.records.engine import PauseMode
from farm.records.engine_state import StoredEngine
from farm.records.request import Instance
from farm.records.rollout import Rollout
from farm.records.trajectory import Segment

Prompt: TypeAlias = str | list[dict[str, Any]]
Instances: TypeAlias = Mapping[str, Instance] | Callable[[Prompt], Instance]
Push: TypeAlias = Callable[[Any, Sequence[StoredEngine]], object]
"""`push(trainer, engines)`: transfer the trainer's weights to these engines. Called in every process of the trainer, as
gathering sharded weights needs all of them; only the first one gets engines."""
RewardFunc: TypeAlias = Callable[..., Sequence[float | None]]

STOP_REASONS = reason_table(ended="stop", cut="length", broken="error", aborted="abort")
"""TRL has no field for it; reward functions get it as `farm_stop_reason`. `mask_truncated_completions` only looks at
the last token, so it masks a multi-turn row that ends in anything but the end-of-sequence token."""


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION = TrainerSampling("generation_kwargs")
MAPPED = frozenset(
    {
        *_SAMPLED,
        *("max_completion_length", "generation_kwargs", "chat_template_kwargs", "max_tool_calling_iterations"),
        "vllm_max_model_length",
    }
)
"""The fields of TRL's `GRPOConfig` that the farm's rollouts follow."""
MAPPED_OF_ASYNC = MAPPED - {"generation_kwargs", "vllm_max_model_length"} | {
    *("num_generations", "token_budget", "max_inflight_tasks", "queue_maxsize")
}
"""The fields of TRL's `AsyncGRPOConfig` that the farm's rollouts follow."""
REFUSED = {"vllm_structured_outputs_regex": "the farm does not constrain answers by a regular expression"}
"""Arguments that must keep their default, with the reason."""


class TrlAdapter:
    """Rows as `rollout_func` returns them: lists by key, one entry for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> dict[str, list[Any]]:
        """Return the rows of the rollouts that may train; `rollout_func` adds placeholders for the others."""
        output = _empty()
        for rollout, segment in single_rows(rollouts, min_version):
            _append(output, rollout, segment, rollout.reward)
        return output

    def read(self, rows: Mapping[str, list[Any]], /) -> list[TrainingRow]:
        """Return the rows as plain values."""
        names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "farm_reward", "farm_rollout_id")
        columns = zip(*(rows[name] for name in names), strict=True)
        return [
            TrainingRow(tuple(prompt), tuple(completion), tuple(mask), tuple(logprobs), reward, None, rollout_id)
            for prompt, completion, mask, logprobs, reward, rollout_id in columns
        ]


rows = TrlAdapter()


def prompt_key(prompt: Prompt) -> str:
    """Return the key of a prompt in `instances`: the text itself, or its messages as JSON without empty fields.

    A data set gives every message the fields of all, with None for missing ones.
    """
    if isinstance(prompt, str):
        return prompt
    messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
    return json.dumps(messages, sort_keys=True, ensure_ascii=False)


def rollout_func(
    client: Farm,
    instances: Instances,
    *,
    run: str,
    push: Push | None = None,
    mode: PauseMode = "drain",
    too_long: TooLong = "error",
    timeout_s: float | None = None,
    **settings: Any,
) -> FarmRolloutFunc:
    """Return a `rollout_func` for GRPOTrainer that runs each step's prompts on the farm.

    `instances` gives a prompt's instance: a mapping by `prompt_key`, or a function. `run` names the training run: with
    the step it makes the batch's key, so that a restarted trainer runs nothing twice. `push` transfers the weights to
    the farm's engines when the trainer's step has advanced, in a weight update with this `mode`. Sampling and lengths
    are the trainer's arguments; a row that still exceeds its `max_completion_length` is handled as `too_long` says.
    `settings` are further fields of `BatchRequest`, which override the trainer's arguments.
    """
    trainer_run = TrainerRun(client, run, settings, timeout_s, takes_experts=False)
    return FarmRolloutFunc(trainer_run, instances, push, mode, too_long)


@dataclass
class FarmRolloutFunc:
    """The object that `rollout_func` returns; TRL calls it with a process's prompts, each repeated for its samples."""

    run: TrainerRun
    instances: Instances
    push: Push | None = None
    mode: PauseMode = "drain"
    too_long: TooLong = "error"
    _pushed: int | None = None

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        """Run a sample for each of the prompts; return one row each, in order."""
        listed = [self._instance(prompt) for prompt in prompts]
        step = int(trainer.state.global_step)
        self._push(trainer, step)
        self.run.part = int(trainer.accelerator.process_index)
        phase: Phase = "train" if trainer.model.training else "eval"
        rollouts = self.run.run_samples(listed, step, phase, **trl_request(trainer.args, self.run.settings))
        check_count(len(rollouts), len(prompts))
        # one process of several may have no training row while others have; then its rows have no numeric reward
        fallback = None if int(trainer.accelerator.num_processes) == 1 else 0.0
        limits = RowLimits(
            response_tokens=trainer.args.max_completion_length,
            vocabulary=_vocabulary(trainer),
            too_long=self.too_long,
            response_option="max_completion_length",
        )
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        pad_id = int(tokenizer.eos_token_id)
        return _output(rows_of_step(rollouts, limits=limits, pad_id=pad_id, fallback=fallback))

    def _instance(self, prompt: Prompt) -> Instance:
        if callable(self.instances):
            return self.instances(prompt)
        key = prompt_key(prompt)
        if key not in self.instances:
            raise InvalidRequest(
                f"no instance is known for the prompt {key[:200]!r}; {len(self.instances)} others are: the data set's "
                "prompts and the keys of `instances` (`prompt_key`) must be the same texts",
                field="instances",
            )
        return self.instances[key]

    def _push(self, trainer: Any, step: int) -> None:
        push = self.push
        if push is None or step == self._pushed:
            return
        if trainer.accelerator.is_main_process:
            WeightPush(self.run.client, lambda engines: push(trainer, engines), self.mode).at(step)
        else:
            push(trainer, ())
        self._pushed = step
        trainer.accelerator.wait_for_everyone()


def trl_request(args: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch from TRL's arguments, except those in the user's `settings`.

    `args` belong to GRPOTrainer, whose `max_completion_length` limits a row, or to AsyncGRPOTrainer, whose own worker
    limits each call by it, and whose rows have a `token_budget`. Raises InvalidRequest for an argument that the farm
    cannot follow.
    """
    refuse_options({name: getattr(args, name, None) for name in REFUSED}, {}, REFUSED)
    most, of_row = args.max_completion_length, not hasattr(args, "token_budget")
    sampled = {name: getattr(args, name) for name in _SAMPLED} | ({} if of_row else {"max_tokens": most})
    sampling = _GENERATION.params(sampled | dict(getattr(args, "generation_kwargs", None) or {}))
    n_tool_turns = args.max_tool_calling_iterations
    longest = args.vllm_max_model_length if of_row else args.token_budget
    limits = limits_of(
        settings,
        # after the last turn with tools TRL samples once more
        max_turns=None if n_tool_turns is None else n_tool_turns + 1,
        max_tokens=most if of_row else None,
        max_response_tokens=most if of_row else None,
        max_row_tokens=longest if longest and longest > 0 else None,
    )
    fields: dict[str, Any] = {"sampling": sampling, "limits": limits}
    if template := args.chat_template_kwargs:
        fields["chat_template_kwargs"] = template
    return fields | {name: settings[name] for name in fields.keys() & settings.keys() - {"limits"}}


def _vocabulary(trainer: Any) -> int | None:
    config = trainer.accelerator.unwrap_model(trainer.model).config
    size = getattr(config, "vocab_size", None) or getattr(getattr(config, "text_config", None), "vocab_size", None)
    return None if size is None else int(size)


def _empty() -> dict[str, list[Any]]:
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    own = ("farm_reward", "farm_rollout_id", "farm_outcome", "farm_stop_reason", "farm_version_min", "farm_version_max")
    return {name: [] for name in (*names, *own)}


def _append(output: dict[str, list[Any]], rollout: Rollout, segment: Segment, reward: float | None) -> None:
    values = (
        segment.prompt_ids.tolist(),
        segment.response_ids.tolist(),
        segment.response_logprobs.tolist(),
        segment.response_mask.tolist(),
        reward,
        rollout.rollout_id,
        str(rollout.outcome or ""),
        STOP_REASONS[rollout.outcome] if rollout.outcome is not None else "abort",
        *segment.version_span,
    )
    for column, value in zip(output.values(), values, strict=True):
        column.append(value)


def _output(step_rows: Sequence[StepRow]) -> dict[str, list[Any]]:
    output = _empty()
    for row in step_rows:
        _append(output, row.rollout, row.segments[0], row.reward if row.scored else None)
    return output


def reward_from_farm(
    prompts: Sequence[Any], completions: Sequence[Any], *, farm_reward: list[float | None], **_: Any
) -> list[float | None]:
    """Return the rewards from the farm's evaluators; None for a failed rollout. A reward function for TRL."""
    return farm_reward


def scored_only(reward_func: RewardFunc) -> Callable[..., list[float | None]]:
    """Return a reward function that returns None wherever the farm has no reward.

    TRL leaves a row out only if all reward functions return None for it: another one next to `reward_from_farm` would
    score the placeholder of a failed rollout.
    """

    @functools.wraps(reward_func)
    def scored(*args: Any, farm_reward: list[float | None], **rest: Any) -> list[float | None]:
        rewards = reward_func(*args, farm_reward=farm_reward, **rest)
        return [None if before is None else after for before, after in zip(farm_reward, rewards, strict=True)]

    return scored
