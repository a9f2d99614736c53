"""slime's options, which the farm follows or refuses, and slime's over-sampling and filters with the farm's collector.

One rollout batch is one collected step. slime's options define it: `rollout_batch_size` groups,
`over_sampling_batch_size` of them in flight, and `dynamic_sampling_filter_path`, a rule for whole groups. Instances
come from slime's data source, or from a sampler of the farm. The farm's store records the groups of a step, so a
restarted trainer gets the same ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farm.adapters.trainer_sampling import TrainerSampling, refuse_options
from farm.client.farm import Farm
from farm.collecting import CollectedStep, CollectingOptions, StepCollector
from farm.collecting.instance_samplers import InstanceSampler, SamplerState
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.rollout import Group, Rollout

SAMPLING = TrainerSampling("sampling_params", ignored=("custom_params",))
_SAMPLED = {
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_new_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
}
"""The sampling parameters of training, by slime's options."""
REFUSED = {
    "rollout_top_p": "slime trains on the kept tokens of top-p then, which are not recorded",
    "partial_rollout": "the farm's rollouts are whole: cancelled ones never train",
    **dict.fromkeys(("rm_type", "custom_rm_path", "group_rm"), "the farm scores each rollout: slime would not call it"),
    **dict.fromkeys(("reward_key", "eval_reward_key"), "the farm's reward is a number"),
    "multimodal_keys": "the farm's rollouts are text only",
}
"""Options that must keep their default, with the reason."""
REFUSED_OF_BATCHES = {
    "rollout_sample_hook_path": "slime's own loop calls it, with the farm's generate function",
    "rollout_all_samples_process_path": "what was left out of a batch is no sample of slime's",
}
"""Further options refused by the rollout function."""
REFUSED_OF_EVALUATIONS = {
    "multimodal_keys": REFUSED["multimodal_keys"],
    **dict.fromkeys(("rm_type", "custom_rm_path"), REFUSED["rm_type"]),
    "apply_chat_template_kwargs": "prompts of an evaluation are rendered by the options that training has",
}
"""Fields of an evaluation's data set that must keep their default."""
UNCHANGED = {"rollout_top_p": 1.0, "partial_rollout": False, "group_rm": False, "rollout_sample_hook_path": []}
MAPPED = frozenset(
    {
        *_SAMPLED.values(),
        *("rollout_max_context_len", "rollout_max_prompt_len", "eval_max_context_len", "apply_chat_template_kwargs"),
        *("rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "dynamic_sampling_filter_path"),
        *("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len", "eval_min_new_tokens"),
        *("rollout_sample_filter_path", "metadata_key", "rollout_seed"),
    }
) - {"rollout_top_p"}
"""slime's options that the farm's rollouts follow; those of evaluations apply through slime's own loop."""


def sampling_of(args: Any) -> dict[str, Any]:
    """Return the sampling parameters that slime itself derives from its options, in training."""
    seeded = getattr(args, "sglang_enable_deterministic_inference", False)
    sampled = {name: getattr(args, option, None) for name, option in _SAMPLED.items()}
    return sampled | {"sampling_seed": args.rollout_seed if seeded else None}


def check_evaluation(args: Any) -> None:
    """Raise InvalidRequest for settings of slime's evaluation data sets that the farm's rollouts cannot follow.

    A data set with its own generate function does not run on the farm.
    """
    for each in getattr(args, "eval_datasets", None) or ():
        if each.custom_generate_function_path is None:
            unchanged = {"apply_chat_template_kwargs": getattr(args, "apply_chat_template_kwargs", None)}
            refuse_options(vars(each), unchanged, REFUSED_OF_EVALUATIONS)


def is_collected(args: Any) -> bool:
    """Return whether slime's options leave the choice of groups to the rollout function."""
    size, over = args.rollout_batch_size, getattr(args, "over_sampling_batch_size", None)
    return bool(getattr(args, "dynamic_sampling_filter_path", None)) or (over is not None and over > size)


@dataclass
class DataSourceInstances:
    """The instances of slime's data source, as a sampler whose state is the number of groups drawn.

    slime restores its data source from its checkpoint, which may be older than the collector's requests: the groups in
    between are drawn and skipped. `samples` has a sample of each instance, for its prompt and label.
    """

    data_source: Any
    instance: Callable[[Mapping[str, Any]], Instance]
    samples: dict[tuple[str, str], Any] = field(default_factory=dict)
    _drawn: dict[int, Instance] = field(default_factory=dict)
    _next: int = 0

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        """Return the next instances after a state, and the state after them."""
        start = state.get("drawn", 0)
        if not isinstance(start, int):
            raise InvalidRequest("the run was started with another sampler; use a new run name", field="sampler")
        if not self._drawn:
            self._fetch(1)
        # groups that the data source gave before did not run in this run
        start = max(start, min(self._drawn))
        if start + n > self._next:
            self._fetch(start + n - self._next)
        return [self._drawn[index] for index in range(start, start + n)], {"drawn": start + n}

    def __len__(self) -> int:
        return len(self.data_source)

    def sample_of(self, rollout: Rollout) -> Any:
        """Return a new sample of a rollout's instance; without its prompt if it was drawn before a restart."""
        if not self.samples:
            self._fetch(1)
        known = self.samples.get((rollout.data_source, rollout.instance_id))
        if known is not None:
            return copy(known)
        kind = type(next(iter(self.samples.values())))
        return kind(prompt=rollout.instance_id)

    def _fetch(self, n: int) -> None:
        for group in self.data_source.get_samples(n):
            first = group[0]
            instance = self.instance(first.metadata or {}).named()
            index = self._next if first.group_index is None else int(first.group_index)
            self._drawn[index] = instance
            self.samples.setdefault((instance.data_source, instance.instance_id), first)
            self._next = index + 1


@dataclass
class SlimeCollector:
    """Collects slime's rollout batches. `fill(samples, rollouts)` fills slime's samples of a group.

    `options` are fields of `CollectingOptions` without an option of slime, such as `leftovers` and `max_staleness`.
    """

    args: Any
    source: DataSourceInstances
    sampler: InstanceSampler | None
    options: Mapping[str, Any]
    fill: Callable[[list[Any], list[Rollout]], list[Any]]
    _collector: StepCollector | None = None

    def collect(self, client: Farm, run: str, request: Mapping[str, Any], step: int) -> CollectedStep:
        """Return the groups of a rollout batch: the recorded ones, or the first that are accepted."""
        if self._collector is None:
            options = collecting_options(self.args, self.options)
            path = getattr(self.args, "dynamic_sampling_filter_path", None)
            accept = self._rule(path) if path else None
            self._collector = StepCollector(client, run, self.sampler or self.source, options, request, accept=accept)
        return self._collector.collect(step)

    def samples_of(self, group: Group, first_index: int = 0, group_index: int = 0) -> list[Any]:
        """Return slime's samples of a group, filled."""
        samples = []
        for index, rollout in enumerate(group.rollouts):
            sample = self.source.sample_of(rollout)
            sample.index, sample.group_index = first_index + index, group_index
            samples.append(sample)
        return self.fill(samples, list(group.rollouts))

    def _rule(self, path: str) -> Callable[[Group], bool]:
        module, _, name = path.rpartition(".")
        function = getattr(importlib.import_module(module), name)

        def accept(group: Group) -> bool:
            kept = function(self.args, self.samples_of(group))
            return bool(getattr(kept, "keep", kept))

        return accept


def collecting_options(args: Any, options: Mapping[str, Any]) -> CollectingOptions:
    """Return slime's options as those of the collector; only slime's own rule drops groups with equal rewards."""
    size, over = args.rollout_batch_size, getattr(args, "over_sampling_batch_size", None)
    # slime sets it to the size of a batch if nothing is over-sampled
    fields = {
        "train_batch_size": size,
        "max_inflight_groups": None if over == size else over,
        "filter_groups": "keep",
    }
    if repeated := [name for name in fields if name in options and name != "filter_groups"]:
        raise InvalidRequest("slime's own options set it", field=repeated[0])
    return CollectingOptions(**{**fields, **options})


def metrics_of(step: CollectedStep) -> dict[str, float]:
    """Return the counts of a step's dropped groups, under slime's names, and lengths of trained and requested data."""
    dropped = {f"rollout/dynamic_filter/drop_{reason}": n for reason, n in step.n_dropped.items()}
    groups = {"cancelled": step.n_cancelled, "requeued": step.n_requeued, "carried": step.n_carried}
    lengths = {"trained": step.trained, "requested": step.requested}
    return {
        **dropped,
        **{f"farm/n_{name}_groups": n for name, n in groups.items()},
        **{f"farm/{name}_tokens": of.mean_tokens for name, of in lengths.items()},
        **{f"farm/{name}_longest_tokens": of.mean_longest_tokens for name, of in lengths.items()},
    }


def group_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw rewards, and rewards minus the mean of their group, counting a rollout with several samples once.

    For `--custom-reward-post-process-path`. Divided by the group's deviation if slime's options say so.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    keys = [(sample.group_index, sample.rollout_id) for sample in samples]
    by_rollout = dict(zip(keys, raw, strict=True))
    normalized = []
    for (group, _), reward in zip(keys, raw, strict=True):
        rewards = np.array([value for (index, _), value in by_rollout.items() if index == group])
        scale = 1.0
        if getattr(args, "grpo_std_normalization", True) and len(rewards) > 1:
            scale = float(rewards.std(ddof=1)) + 1e-6
        normalized.append(float((reward - rewards.mean()) / scale))
    return raw, normalized


def train_output(args: Any, sample: Any, groups: list[list[Any]], metrics: Mapping[str, Any] | None = None) -> Any:
    """Return `RolloutFnTrainOutput` of slime or miles: of the package that the samples belong to."""
    package = type(sample).__module__.partition(".")[0]
    output = importlib.import_module(f"{package}.rollout.base_types").RolloutFnTrainOutput
    flat = [each for group in groups for one in group for each in (one if isinstance(one, list) else [one])]
    if path := getattr(args, "rollout_sample_filter_path", None):
        removed = [each for each in flat if each.remove_sample]
        module, _, name = path.rpartition(".")
        getattr(importlib.import_module(module), name)(args, groups)
        for each in removed:
            each.remove_sample = True
    return output(
        samples=groups, metrics={"farm/n_removed": sum(each.remove_sample for each in flat), **(metrics or {})}
    )
