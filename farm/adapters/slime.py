"""slime, and miles, which has the same interfaces: samples that run on the farm.

    # my_farm.py: --rollout-function-path my_farm.generate_rollout --custom-generate-function-path my_farm.generate
    generate_rollout = rollout_function(farm.connect, run="exp-1")
    generate = generate_function(farm.connect, run="exp-1")

A sample's instance is in its metadata, `farm_instance` (`--metadata-key`). A failed rollout becomes a sample with
`remove_sample`, for which slime zeroes the loss mask, and the neutral reward (`farm.adapters.single_row`): slime takes
the mean of a group over all of its samples.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import (
    BrokenRollouts,
    RewardsSoFar,
    RowLimits,
    SampleWindow,
    StepRow,
    TooLong,
    reason_table,
    replayed,
    rows_of_step,
    single_rows,
    with_experts,
)
from farm.adapters.slime_collecting import (
    REFUSED,
    REFUSED_OF_BATCHES,
    SAMPLING,
    UNCHANGED,
    DataSourceInstances,
    SlimeCollector,
    check_evaluation,
    is_collected,
    metrics_of,
    sampling_of,
    train_output,
)
from farm.adapters.slime_collecting import group_rewards as group_rewards
from farm.adapters.trainer_sampling import limits_of, refuse_options
from farm.adapters.trainer_step import Phase, TrainerRun, check_count, check_engines, instance_of, router_servers
from farm.client.farm import Farm
from farm.collecting import InstanceSampler
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment

STATUSES = reason_table(ended="completed", cut="truncated", broken="failed", aborted="failed")
"""Never `aborted`: slime generates such a sample again, and gives it no reward."""
_REPLAY = "use_rollout_routing_replay"
_FIRST_RUN: list[str] = []


class SlimeAdapter:
    """Rows as the fields of slime's `Sample`: a mapping for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that may train; a rollout function also has samples for the others."""
        return [
            sample_fields(rollout, segment, float(rollout.reward or 0.0), remove=False)
            for rollout, segment in single_rows(rollouts, min_version)
        ]

    def read(self, rows: Sequence[Mapping[str, Any]], /) -> list[TrainingRow]:
        """Return the rows as plain values."""
        read_rows = []
        for row in rows:
            n_prompt = len(row["tokens"]) - row["response_length"]
            prompt, response = row["tokens"][:n_prompt], row["tokens"][n_prompt:]
            mask, logprobs = tuple(row["loss_mask"]), tuple(row["rollout_log_probs"])
            rollout_id = row["metadata"]["farm_rollout_id"]
            read_rows.append(
                TrainingRow(tuple(prompt), tuple(response), mask, logprobs, row["reward"], None, rollout_id)
            )
        return read_rows


rows = SlimeAdapter()


def sample_fields(rollout: Rollout, segment: Segment, reward: float, *, remove: bool) -> dict[str, Any]:
    """Return the `Sample` fields that a rollout determines, by name; `status` is the value of its `Status`."""
    versions = sorted({int(version) for version in segment.policy_versions if version != NO_VERSION})
    experts = replayed(segment)
    return {
        "tokens": [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()],
        "response_length": len(segment.response_ids),
        "loss_mask": segment.response_mask.tolist(),
        "rollout_log_probs": segment.response_logprobs.tolist(),
        "reward": reward,
        "status": "failed" if rollout.outcome is None else STATUSES[rollout.outcome],
        "weight_versions": [str(version) for version in versions],
        # of the type that SGLang returns
        **({} if experts is None else {"rollout_routed_experts": experts.astype(np.int32)}),
        "remove_sample": remove,
        "metadata": {
            "farm_rollout_id": rollout.rollout_id,
            "farm_outcome": str(rollout.outcome or ""),
            "farm_n_turns": rollout.n_turns,
        },
    }


@dataclass
class SlimeSamples:
    """The farm's side of both functions: fills slime's samples with their rollouts.

    `connect` is called once, in the process that generates. `instance(metadata)` returns a sample's instance. With
    `every_segment`, a rollout becomes a list of samples with one `rollout_id`; then use `group_rewards`
    (`--custom-reward-post-process-path`) for the reward's baseline, as slime's own takes the whole batch for one group.
    """

    connect: Callable[[], Farm]
    run: str
    instance: Callable[[Mapping[str, Any]], Instance] = instance_of
    broken: BrokenRollouts = "neutral"
    too_long: TooLong = "error"
    every_segment: bool = False
    vocabulary: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    own_engines: bool = True
    """Use the servers of slime's router, unless the settings name a `model` or an `engine_url`."""
    decode: Callable[[list[int]], str] | None = None
    """Returns a response's text, for slime's logs and filters; without it, the text is empty."""
    servers_of: str = ""
    """The run for which slime's servers are registered; by default this one."""
    _run: TrainerRun | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def check(self, args: Any) -> None:
        """Raise InvalidRequest for options of slime that the farm's rollouts cannot follow."""
        refuse_options(vars(args), UNCHANGED, REFUSED)
        one_path = getattr(args, "custom_reward_post_process_path", None)
        grouped = getattr(args, "advantage_estimator", "grpo") != "ppo" and getattr(args, "rewards_normalization", True)
        if self.every_segment and grouped and one_path is None:
            raise InvalidRequest(
                "with several samples for a rollout slime takes the whole batch for one group: set it to "
                "farm.adapters.slime.group_rewards",
                field="custom_reward_post_process_path",
            )

    def run_samples(
        self,
        args: Any,
        samples: Sequence[Any],
        step: int,
        sampling_params: Mapping[str, Any] | None = None,
        evaluation: bool = False,
    ) -> list[Rollout]:
        """Run these samples; return a rollout for each, in order.

        `sampling_params` are those that slime passes to a generate function: an evaluation has its own.
        """
        phase: Phase = "eval" if evaluation else "train"
        listed = [self.instance(sample.metadata or {}) for sample in samples]
        rollouts = self._on_engines(args).run_samples(
            listed, step, phase, **self._request(args, sampling_params, phase)
        )
        check_count(len(rollouts), len(samples))
        return rollouts

    def fill(
        self,
        args: Any,
        samples: Sequence[Any],
        rollouts: Sequence[Rollout],
        fallback: float | None = None,
        evaluation: bool = False,
    ) -> list[Any]:
        """Return the samples, filled with their rollouts: a sample for each, or a list of several for its segments."""
        limits = RowLimits(
            prompt_tokens=getattr(args, "rollout_max_prompt_len", None),
            total_tokens=getattr(args, "rollout_max_context_len", None),
            vocabulary=self.vocabulary,
            too_long=self.too_long,
            prompt_option="rollout_max_prompt_len",
            total_option="rollout_max_context_len",
        )
        groups = [getattr(sample, "group_index", None) for sample in samples]
        step_rows = rows_of_step(
            rollouts,
            broken=self.broken,
            limits=limits,
            every_segment=self.every_segment,
            fallback=fallback,
            groups=None if None in groups else groups,
        )
        if _replays(args) and not evaluation:
            step_rows = with_experts(step_rows, (args.num_layers, args.moe_router_topk), _REPLAY)
        return [self._filled(sample, row) for sample, row in zip(samples, step_rows, strict=True)]

    def _filled(self, sample: Any, row: StepRow) -> Any:
        siblings = [sample, *(copy(sample) for _ in row.segments[1:])]
        filled = [self._with(one, row, segment) for one, segment in zip(siblings, row.segments, strict=True)]
        return filled if self.every_segment else filled[0]

    def _with(self, sample: Any, row: StepRow, segment: Segment) -> Any:
        fields = sample_fields(row.rollout, segment, row.reward, remove=row.masked)
        for name, value in fields.items():
            if name == "status":
                sample.status = type(sample).Status(value)
            elif name == "metadata":
                sample.metadata = {**(sample.metadata or {}), **value}
            else:
                setattr(sample, name, value)
        sample.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        if self.decode is not None:
            sample.response = self.decode(segment.response_ids.tolist())
        return sample

    def collected_by(self, args: Any, n_samples: int) -> tuple[Farm, str, dict[str, Any]]:
        """Return the arguments of a collector for this run: the client, the run's name and the request of groups."""
        run = self._on_engines(args)
        check_engines(run.client.engines(), run.settings.get("model", ""))
        return run.client, run.name, {**run.settings, "n_samples": n_samples, **self._request(args, None, "train")}

    def _request(self, args: Any, sampling_params: Mapping[str, Any] | None, phase: Phase) -> dict[str, Any]:
        """Return the fields of a batch from slime's options and its call, except those in the settings."""
        longest = "eval_max_context_len" if phase == "eval" else "rollout_max_context_len"
        limits = limits_of(self.settings, max_row_tokens=getattr(args, longest, None))
        values = dict(sampling_of(args) if sampling_params is None else sampling_params)
        if _replays(args) and phase == "train":
            values["routed_experts"] = args.moe_router_topk
        fields = {"sampling": SAMPLING.params(values)}
        request: dict[str, Any] = {name: value for name, value in fields.items() if name not in self.settings}
        template = getattr(args, "apply_chat_template_kwargs", None) or {}
        if template:
            request["chat_template_kwargs"] = {**template, **self.settings.get("chat_template_kwargs", {})}
        return request | {"limits": limits}

    def _on_engines(self, args: Any) -> TrainerRun:
        """Return the run, which uses the servers that slime's router has now."""
        run = self._connected()
        if self.own_engines and getattr(args, "sglang_router_ip", None) and not run.names_engines:
            run.use_servers(router_servers(args.sglang_router_ip, args.sglang_router_port, args.hf_checkpoint))
        return run

    def _connected(self) -> TrainerRun:
        with self._lock:
            if self._run is None:
                run = TrainerRun(self.connect(), self.run, self.settings, self.timeout_s, servers_of=self.servers_of)
                self._run = run
                atexit.register(run.remove_servers)
            return self._run


def _replays(args: Any) -> bool:
    return bool(getattr(args, _REPLAY, False))


def _servers_of(run: str) -> str:
    """Return the run for which this process registers slime's servers: that of the first function created.

    A server is registered for one run, and slime's functions for training and evaluation share its servers.
    """
    _FIRST_RUN.append(run)
    return _FIRST_RUN[0]


def rollout_function(
    connect: Callable[[], Farm],
    run: str,
    *,
    sampler: InstanceSampler | None = None,
    collecting: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function for `--rollout-function-path`; `options` are those of `SlimeSamples`.

    If slime's options over-sample or filter groups, or `collecting` has fields of `CollectingOptions`, the farm
    collects the groups of a rollout batch; `sampler` then replaces slime's data source.
    """
    samples_of = SlimeSamples(connect, run, **{"servers_of": _servers_of(run), **options})
    collectors: dict[int, SlimeCollector] = {}

    def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        """Run one rollout batch of slime's data source; the step is its `rollout_id`."""
        if evaluation:
            raise InvalidRequest(
                "this function runs training batches: set it to slime.rollout.sglang_rollout.generate_rollout, with "
                "the farm's generate function in custom_generate_function_path",
                field="eval_function_path",
            )
        samples_of.check(args)
        refuse_options(vars(args), UNCHANGED, REFUSED_OF_BATCHES)
        if is_collected(args) or collecting is not None or sampler is not None:
            if id(data_source) not in collectors:
                source = DataSourceInstances(data_source, samples_of.instance)
                fill = functools.partial(samples_of.fill, args)
                collectors[id(data_source)] = SlimeCollector(args, source, sampler, collecting or {}, fill)
            return _collected_output(samples_of, collectors[id(data_source)], args, rollout_id)
        groups = data_source.get_samples(args.rollout_batch_size)
        listed = list(itertools.chain.from_iterable(groups))
        filled = samples_of.fill(args, listed, samples_of.run_samples(args, listed, rollout_id))
        sizes = [len(group) for group in groups]
        bounds = [0, *itertools.accumulate(sizes)]
        return train_output(args, listed[0], [filled[start:end] for start, end in itertools.pairwise(bounds)])

    return generate_rollout


def _collected_output(samples_of: SlimeSamples, collector: SlimeCollector, args: Any, step: int) -> Any:
    n = args.n_samples_per_prompt
    collected = collector.collect(*samples_of.collected_by(args, n), step)
    first = step * len(collected.groups)
    filled = [
        collector.samples_of(group, (first + index) * n, first + index) for index, group in enumerate(collected.groups)
    ]
    one = filled[0][0]
    return train_output(args, one[0] if isinstance(one, list) else one, filled, metrics_of(collected))


def generate_function(connect: Callable[[], Farm], run: str, **options: Any) -> Callable[..., Any]:
    """Return a function for `--custom-generate-function-path`: one sample per call; samples of a group run together.

    slime passes no step number, so a restarted trainer does not resume earlier rollouts. `options` are those of
    `SlimeSamples`.
    """
    options = {"servers_of": _servers_of(run), **options}
    groups = _GeneratedGroups(SlimeSamples(connect, f"{run}-{secrets.token_hex(4)}", **options))

    async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
        """Run a sample within its group; return it filled, or several samples for its segments."""
        return await groups.generate(_Call(args, sample, sampling_params, evaluation))

    return generate


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the generate function."""

    args: Any
    sample: Any
    sampling_params: Mapping[str, Any]
    evaluation: bool


@dataclass
class _GeneratedGroups:
    """Groups of a generate function. A group that failed whole gets the mean of all rewards so far."""

    samples_of: SlimeSamples
    _windows: dict[bool, SampleWindow[_Call, Any]] = field(default_factory=dict)
    _n_groups: int = 0
    _so_far: dict[bool, RewardsSoFar] = field(default_factory=lambda: {True: RewardsSoFar(), False: RewardsSoFar()})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def generate(self, call: _Call) -> Any:
        self.samples_of.check(call.args)
        if call.evaluation:
            check_evaluation(call.args)
        if call.evaluation not in self._windows:
            # an evaluation has as many samples of a problem as its data set says
            most = None if call.evaluation else getattr(call.args, "n_samples_per_prompt", None)
            self._windows[call.evaluation] = SampleWindow(self._run_calls, most=most)
        # an evaluation does not number groups: they are those of one problem
        group = call.sample.metadata if call.evaluation else call.sample.group_index
        # in deterministic inference each sample of a group has its own seed: the farm derives them from the first
        sampling = {name: value for name, value in call.sampling_params.items() if name != "sampling_seed"}
        return await self._windows[call.evaluation].result(
            json.dumps([group, sampling], sort_keys=True, default=str), call
        )

    def _run_calls(self, calls: Sequence[_Call]) -> list[Any]:
        args, evaluation = calls[0].args, calls[0].evaluation
        samples = [call.sample for call in calls]
        sampling = dict(calls[0].sampling_params)
        if "sampling_seed" in sampling:
            sampling["sampling_seed"] = min(call.sampling_params["sampling_seed"] for call in calls)
        with self._lock:
            self._n_groups += 1
            step = self._n_groups
        rollouts = self.samples_of.run_samples(args, samples, step, sampling, evaluation)
        filled = self.samples_of.fill(args, samples, rollouts, self._so_far[evaluation].fallback(), evaluation)
        self._so_far[evaluation].take([each.reward for each in rollouts if each.trainable and each.reward is not None])
        return filled
