"""SkyRL: a generator whose trajectories run on the farm, plain or step-wise.

    class FarmExp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return FarmGenerator(
                client,
                cfg.generator,
                run="exp-1",
                tokenizer=tokenizer,
                inference_engine_client=inference_engine_client,
            )

Plain: each trajectory is one row. Step-wise (`generator.step_wise_trajectories`): each of its segments is a row; rows
of a trajectory are adjacent, with its reward on the last. SkyRL has no field for a trajectory without a reward, and
takes the mean of a group over all of its rows: see `farm.adapters.single_row` for the row of a failed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from farm.adapters.engine_bridge import EngineBridge, OwnEngines, SampledByTrainer
from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import (
    BrokenRollouts,
    RewardsSoFar,
    RowLimits,
    StepRow,
    TooLong,
    reason_table,
    replayed,
    rows_of_step,
    single_rows,
    with_experts,
)
from farm.adapters.trainer_sampling import TrainerSampling, limits_of, option, refuse_options
from farm.adapters.trainer_step import Phase, TrainerRun, check_count, instance_of
from farm.client.farm import Farm
from farm.errors import InvalidRequest, NoTrainableRollouts
from farm.records.request import Instance, SamplingParams
from farm.records.rollout import Outcome, Rollout
from farm.records.trajectory import Segment

STOP_REASONS = reason_table(
    ended="stop",
    cut="length",
    broken="error",
    aborted="abort",
    named={
        Outcome.MAX_TURNS: "stop",
        Outcome.DEADLINE: "agent_timeout",
    },
)
"""SkyRL's options for truncated rows check whether the reason is `stop`; the last turn of many may have it."""
_SAMPLING = TrainerSampling("sampling_params", ignored=("additional_kwargs",))
_EXPERTS = "inference_engine.enable_return_routed_experts"
_OVERLONG, _ZERO, _STEPS = "apply_overlong_filtering", "zero_reward_on_non_stop", "step_wise_trajectories"
MAPPED = frozenset(
    {
        *("max_turns", "max_input_length", "chat_template_kwargs", "use_cache_salt"),
        *("sampling_params", "eval_sampling_params", _OVERLONG, _ZERO, _STEPS, _EXPERTS),
    }
)
"""The fields of SkyRL's `GeneratorConfig` that the farm's rollouts follow."""
REFUSED = {
    "use_conversation_multi_turn": "the farm holds a message for each turn",
    "vision_language_generator": "the farm's rollouts are text only",
    "chat_template": "prompts are rendered by the chat template of the engine's model",
}
"""Options that must keep their default, with the reason."""
_UNCHANGED = {"use_conversation_multi_turn": True, "vision_language_generator": False}


class SkyRLAdapter:
    """Rows as in a plain `GeneratorOutput`: lists by key, one entry for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> dict[str, Any]:
        """Return the rows of the rollouts that may train; `FarmGenerator` adds placeholders for the others."""
        output = _empty()
        for rollout, segment in single_rows(rollouts, min_version):
            _append(output, rollout, segment, float(rollout.reward or 0.0))
        return output

    def read(self, rows: Mapping[str, Any], /) -> list[TrainingRow]:
        """Return the rows as plain values; a reward on tokens is summed."""
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

    `instance(env_extras)` returns a prompt's instance; by default it is in the data set's column `farm_instance`.
    `max_seq_len` is the trainer's (`cfg.trainer.algorithm.max_seq_len`); `settings` are further fields of
    `BatchRequest`, whose limits override those of `generator_cfg`. `tokenizer` and `inference_engine_client` are the
    arguments of `get_generator`: the farm uses SkyRL's engines through that client. Without it, with `own_engines`
    False, or with a `model` or an `engine_url` in the settings, it uses its own. `expert_form` is needed with
    `enable_return_routed_experts`: (layers of the model, experts per token). Raises InvalidRequest for an option of
    `generator_cfg` that the farm's rollouts cannot follow.
    """

    client: Farm
    generator_cfg: Any
    run: str
    instance: Callable[[Mapping[str, Any]], Instance] = instance_of
    broken: BrokenRollouts = "neutral"
    too_long: TooLong = "error"
    max_seq_len: int | None = None
    settings: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    tokenizer: Any = None
    inference_engine_client: Any = None
    expert_form: tuple[int, int] | None = None
    own_engines: bool = True
    bridge_host: str = ""
    """This machine's address as reachable from the farm's nodes; by default that of its default route."""
    _so_far: RewardsSoFar = field(default_factory=RewardsSoFar, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_experts()
        refuse_options({name: _option(self.generator_cfg, name) for name in REFUSED}, _UNCHANGED, REFUSED)
        settings = dict(self.settings or {})
        template = _option(self.generator_cfg, "chat_template_kwargs") or {}
        if template:
            settings["chat_template_kwargs"] = {**template, **settings.get("chat_template_kwargs", {})}
        settings["limits"] = limits_of(
            settings,
            max_turns=_option(self.generator_cfg, "max_turns"),
            max_prompt_tokens=_option(self.generator_cfg, "max_input_length"),
            max_row_tokens=self.max_seq_len,
        )
        self._run = TrainerRun(self.client, self.run, settings, self.timeout_s)
        self._engines = OwnEngines(self._run, self.bridge_host)
        uses_bridge = self.own_engines and self.inference_engine_client is not None
        if uses_bridge and not self._run.names_engines:
            tokenizer = str(getattr(self.tokenizer, "name_or_path", ""))
            self._engines.bridge = _bridge_of(self.inference_engine_client, tokenizer)

    def _check_experts(self) -> None:
        if not _option(self.generator_cfg, _EXPERTS):
            self.expert_form = None
        elif self.step_wise:
            raise InvalidRequest("step-wise, SkyRL replays no routing", field=_EXPERTS)
        elif self.expert_form is None:
            raise InvalidRequest(
                "routing is replayed: give (num_hidden_layers, num_experts_per_tok) of the model", field="expert_form"
            )

    @property
    def step_wise(self) -> bool:
        return bool(_option(self.generator_cfg, _STEPS))

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """Run every prompt of the batch; return SkyRL's `GeneratorOutput`, in the batch's order."""
        extras, trajectory_ids = input_batch.get("env_extras"), input_batch.get("trajectory_ids")
        if extras is None:
            raise InvalidRequest("the data set has only the prompt column, so no instance", field="env_extras")
        if self.step_wise and trajectory_ids is None:
            raise InvalidRequest("is missing: step-wise rows need it to be told apart", field="trajectory_ids")
        listed = [self.instance(each) for each in extras]
        metadata = input_batch.get("batch_metadata")
        step = 0 if metadata is None else int(metadata.global_step)
        phase: Phase = "eval" if metadata is not None and metadata.training_phase == "eval" else "train"
        sampling = self._sampling(input_batch.get("sampling_params") or {})
        if self.expert_form is not None and phase == "train":
            sampling = sampling.model_copy(update={"routed_experts": self.expert_form[1]})
        loop = asyncio.get_running_loop()

        def run_samples() -> list[Rollout]:
            with self._engines.admitted(loop):
                return self._run.run_samples(listed, step, phase, sampling=sampling)

        rollouts = await asyncio.to_thread(run_samples)
        check_count(len(rollouts), len(input_batch["prompts"]))
        return self._output(rollouts, trajectory_ids, phase)

    def _sampling(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling of a batch; if SkyRL passes none, that of its configuration."""
        fields = _SAMPLING.fields(values or _plain(_option(self.generator_cfg, "sampling_params")))
        version = getattr(self.inference_engine_client, "weight_version", None)
        if version is not None and _option(self.generator_cfg, "use_cache_salt") is not False:
            fields.setdefault("cache_salt", str(version))
        return SamplingParams(**fields)

    def _output(
        self, rollouts: Sequence[Rollout], trajectory_ids: Sequence[Any] | None, phase: Phase = "train"
    ) -> dict[str, Any]:
        if _option(self.generator_cfg, _ZERO):
            rollouts = [_zeroed(rollout) for rollout in rollouts]
        limits = RowLimits(
            total_tokens=self.max_seq_len,
            vocabulary=None if self.tokenizer is None else len(self.tokenizer),
            too_long=self.too_long,
            total_option="max_seq_len",
        )
        if trajectory_ids is None:
            groups = [each.group_id for each in rollouts]
        else:
            groups = [each.instance_id for each in trajectory_ids]
        # the fully asynchronous trainer asks for one group at a time, and ends if a call fails
        is_one_group = phase == "train" and len(set(groups)) == 1
        step_rows = rows_of_step(
            rollouts,
            broken=self.broken,
            limits=limits,
            every_segment=self.step_wise,
            fallback=self._so_far.fallback() if is_one_group else None,
            groups=groups,
        )
        if phase == "train":
            self._so_far.take([row.reward for row in step_rows if row.scored])
        if phase == "eval":
            _check_whole_groups(step_rows)
        elif self.expert_form is not None:
            step_rows = with_experts(step_rows, self.expert_form, _EXPERTS)
        if _option(self.generator_cfg, _OVERLONG):
            step_rows = [_filtered(row) for row in step_rows]
        output = _empty()
        if self.step_wise:
            assert trajectory_ids is not None
            output |= {"trajectory_ids": [], "is_last_step": []}
            for row, trajectory_id in zip(step_rows, trajectory_ids, strict=True):
                _append_steps(output, row, trajectory_id)
        else:
            of_tokens = any(row.scored and row.segments[0].turn_rewards for row in step_rows)
            for row in step_rows:
                (segment, *_), reward = row.segments, row.reward
                _append(output, row.rollout, segment, _of_tokens(segment, reward, row.scored) if of_tokens else reward)
            if self.expert_form is not None and phase == "train":
                output["rollout_expert_indices"] = [_indices(row.segments[0]) for row in step_rows]
            output["trajectory_ids"] = None if trajectory_ids is None else list(trajectory_ids)
        return output | {"rollout_metrics": _metrics(step_rows)}


def _option(config: Any, path: str) -> Any:
    """Return an option of SkyRL's configuration, None if missing; the model's own chat template is None."""
    return option(config, "chat_template.name_or_path" if path == "chat_template" else path)


def _plain(values: Any) -> Mapping[str, Any]:
    if values is None or isinstance(values, Mapping):
        return values or {}
    return dict(vars(values))


def _reason(rollout: Rollout) -> str:
    return "abort" if rollout.outcome is None else STOP_REASONS[rollout.outcome]


def _zeroed(rollout: Rollout) -> Rollout:
    """Return it with the reward 0 if a limit cut it short, like `zero_reward_on_non_stop`."""
    return replace(rollout, reward=0.0) if rollout.trainable and _reason(rollout) != "stop" else rollout


def _filtered(row: StepRow) -> StepRow:
    """Return it with mask 0 if a limit cut it short, like `apply_overlong_filtering`."""
    if row.masked or _reason(row.rollout) == "stop":
        return row
    segments = tuple(replace(each, response_mask=np.zeros_like(each.response_mask)) for each in row.segments)
    return replace(row, segments=segments, masked=True)


def _check_whole_groups(step_rows: Sequence[StepRow]) -> None:
    """Raise NoTrainableRollouts if all rollouts of a problem failed: SkyRL's metrics would count the problem."""
    if lost := [row.rollout for row in step_rows if row.group_unscored]:
        problems = sorted({rollout.instance_id for rollout in lost})
        failure = next((f": {each.failure.message}" for each in lost if each.failure is not None), "")
        raise NoTrainableRollouts(
            f"no rollout of {len(problems)} problems of an evaluation was scored ({', '.join(problems[:5])}), and "
            f"SkyRL's metrics would count them; the first is {lost[0].rollout_id}{failure}"
        )


def _bridge_of(client: Any, tokenizer: str) -> EngineBridge:
    """Return a bridge to SkyRL's engines, through the client of its own generator."""

    async def generate(prompt_ids: list[int], sampling: dict[str, Any], session: str) -> SampledByTrainer:
        # SkyRL also requires the text of an answer, whatever is requested
        params = {name: value for name, value in sampling.items() if name not in ("cache_salt", "detokenize")}
        request = {"prompt_token_ids": [prompt_ids], "sampling_params": params, "session_ids": [session]}
        if "cache_salt" in sampling:
            request["cache_salt"] = sampling["cache_salt"]
        # a later version may have sampled a part: the older one bounds the age of the whole
        version = getattr(client, "weight_version", None)
        output = await client.generate(request)
        logprobs = output["response_logprobs"]
        return SampledByTrainer(
            output["response_ids"][0],
            (logprobs[0] if logprobs else None) or [],
            output["stop_reasons"][0],
            "" if version is None else str(version),
            routed_experts=(output.get("rollout_expert_indices") or [None])[0],
        )

    return EngineBridge(generate, tokenizer)


def _empty() -> dict[str, Any]:
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    absent = ("rollout_expert_indices", "trajectory_generation_times", "trajectory_time_splits", "env_metrics")
    return {
        **{name: [] for name in names},
        **dict.fromkeys((*absent, "pixel_values", "image_grid_thw", "trajectory_ids", "is_last_step"), None),
        "rollout_metrics": None,
    }


def _of_tokens(segment: Segment, reward: float, scored: bool) -> list[float]:
    """Return a reward for each token: a turn's reward at its last one, and the remaining reward at the end."""
    values = [0.0] * len(segment.response_ids)
    for position, turn_reward in segment.turn_rewards if scored else ():
        values[max(position, 0)] += turn_reward
    values[-1] += reward - sum(values)
    return values


def _append(output: dict[str, Any], rollout: Rollout, segment: Segment, reward: float | list[float]) -> None:
    output["prompt_token_ids"].append(segment.prompt_ids.tolist())
    output["response_ids"].append(segment.response_ids.tolist())
    output["rewards"].append(reward)
    output["loss_masks"].append(segment.response_mask.tolist())
    output["stop_reasons"].append(_reason(rollout))
    output["rollout_logprobs"].append(segment.response_logprobs.tolist())


def _indices(segment: Segment) -> list[list[list[int]]]:
    experts = replayed(segment)
    assert experts is not None
    indices: list[list[list[int]]] = experts.tolist()
    return indices


def _append_steps(output: dict[str, Any], row: StepRow, trajectory_id: Any) -> None:
    """Append the segments of a rollout as adjacent steps, with the reward only on the last."""
    *_, last = range(len(row.segments))
    for index, segment in enumerate(row.segments):
        _append(output, row.rollout, segment, row.reward if index == last else 0.0)
        output["trajectory_ids"].append(trajectory_id)
        output["is_last_step"].append(index == last)


def _metrics(step_rows: Sequence[StepRow]) -> dict[str, float]:
    """Return means over the scored rollouts, and the number of the others."""
    scored = [row.rollout for row in step_rows if row.scored]
    n = max(len(scored), 1)
    return {
        "farm/n_unscored": float(sum(not row.scored for row in step_rows)),
        "farm/avg_n_turns": sum(each.n_turns for each in scored) / n,
        "farm/mean_reward": sum(each.reward or 0.0 for each in scored) / n,
    }
