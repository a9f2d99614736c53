"""TRL's AsyncGRPOTrainer: a rollout worker and a weight transfer that use the farm.

    trainer = AsyncGRPOTrainer(
        ...,
        args=args,  # an AsyncGRPOConfig
        rollout_worker=FarmRolloutWorker(client, instances, args=args, run="exp-1"),
        weight_transfer=FarmWeightTransfer(client, push),
    )

The worker keeps groups in flight and passes each to the trainer when its last member has ended. It computes the
advantages itself, as that protocol requires: over the scored members of a group, so a failed one neither trains nor
counts. A rollout with several segments makes a row for each, with one advantage.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, cast

import numpy as np

from farm.adapters.protocol import training_rows
from farm.adapters.trainer_step import TrainerRun
from farm.adapters.trl import trl_request
from farm.client.farm import Farm
from farm.collecting import CollectingOptions, GroupDecision, InstanceSampler, ShuffledInstances
from farm.collecting.instance_samplers import SamplerState
from farm.collecting.waves import AcceptGroup, decide
from farm.errors import InvalidRequest
from farm.records.engine import PauseMode
from farm.records.engine_state import StoredEngine
from farm.records.request import Instance
from farm.records.rollout import Group, Rollout
from farm.records.trajectory import Segment

_EPSILON = 1e-8
"""The epsilon of TRL's own `AsyncRolloutWorker`, whose deviation is the population's; `GRPOTrainer` has another."""
_GROUPS_IN_FLIGHT = 8
_STOP_S = 10.0
_PUT_S = 0.1


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One training row of a group: its segment, and its advantage over the scored members."""

    rollout: Rollout
    segment: Segment
    advantage: float
    reward_std: float


def group_rows(rollouts: Sequence[Rollout], *, scaled: bool = True) -> list[GroupRow]:
    """Return the rows of a group that may train, each with its rollout's advantage.

    The mean and the deviation are over the scored members only, as in TRL's own worker; a group with fewer than two has
    no rows, as there is nothing to compare.
    """
    scored = [rollout for rollout in rollouts if rollout.trainable]
    rewards = np.array([rollout.reward for rollout in scored], np.float64)
    if len(rewards) < 2:
        return []
    std = float(rewards.std())
    centred = rewards - rewards.mean()
    advantages = centred / (std + _EPSILON) if scaled else centred
    by_id = dict(zip((rollout.rollout_id for rollout in scored), advantages.tolist(), strict=True))
    return [GroupRow(each, segment, by_id[each.rollout_id], std) for each, segment in training_rows(scored)]


class FarmRolloutWorker:
    """A `RolloutWorkerProtocol` of AsyncGRPOTrainer. Each of its threads waits for one group at a time.

    `instances` is cycled, or is a sampler of `farm.collecting`, such as a `Mixture`. `args` are the trainer's
    arguments, an `AsyncGRPOConfig`: they give the samples of a group, their sampling and lengths, the groups in flight
    and the size of the queue; `settings` are further fields of `BatchRequest`. Each start of a worker has a new run
    name, as the trainer starts its versions at 0 again: groups of a killed trainer are not resumed. `filter_groups`,
    `min_samples` and `accept` are the rules of `farm.collecting` for groups that must not train.
    """

    def __init__(
        self,
        client: Farm,
        instances: Iterable[Instance] | InstanceSampler,
        *,
        args: Any,
        run: str,
        n_groups_in_flight: int | None = None,
        filter_groups: Literal["drop", "keep"] = "keep",
        min_samples: int = 2,
        accept: AcceptGroup | None = None,
        scaled: bool = True,
        **settings: Any,
    ) -> None:
        n_samples = int(args.num_generations)
        if n_samples < 2:
            raise InvalidRequest("a group needs at least two samples to compare", field="num_generations")
        # with -1 TRL leaves it to the worker
        n_of_args = max(1, args.max_inflight_tasks // n_samples) if args.max_inflight_tasks > 0 else _GROUPS_IN_FLIGHT
        n_groups = n_groups_in_flight or n_of_args
        # the trainer requests no steps, so only the rules for groups apply
        rules = CollectingOptions(1, filter_groups=filter_groups, min_samples=min_samples, max_staleness=None)
        self._least = rules.check_samples(n_samples)
        self._filtered = filter_groups == "drop"
        self._accept = accept
        self._sampler = _sampler(instances)
        self._state: SamplerState = {}
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        fields = settings | trl_request(args, settings)
        self._run = TrainerRun(client, f"{run}-{secrets.token_hex(4)}", fields, takes_experts=False)
        self._n_samples = n_samples
        self._scaled = scaled
        self._model_version = 0
        self._ended_at = time.monotonic()
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._numbers = count()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"farm-rollouts-{index}", daemon=True) for index in range(n_groups)
        ]

    def start(self) -> None:
        """Start running groups."""
        self._ended_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no more groups; those in flight end on the farm."""
        self._over.set()
        for thread in self._threads:
            thread.join(_STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Set the current weight version of the engines, for rollouts that do not report it themselves."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended a thread, or TimeoutError if no group has ended for so long."""
        if self._failure is not None:
            raise self._failure
        if (silent_s := time.monotonic() - self._ended_at) > stale_after_s:
            raise TimeoutError(f"no group has ended on the farm for {silent_s:.0f} s")

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                with self._lock:
                    number = next(self._numbers)
                    (instance,), self._state = self._sampler.draw(1, self._state)
                self._run_instance(number, instance)
        except Exception as error:
            self._failure = error
            self._over.set()

    def _run_instance(self, number: int, instance: Instance) -> None:
        begun_with = self._model_version
        rollouts = self._run.run_samples([instance] * self._n_samples, number)
        self._ended_at = time.monotonic()
        n_unscored = sum(not rollout.trainable for rollout in rollouts)
        metrics = {"farm/n_unscored_total": float(n_unscored)}
        group = Group(rollouts[0].group_id, tuple(rollouts))
        decision = decide(group, self._least, filtered=self._filtered, accept=self._accept)
        dropped = decision is not GroupDecision.ACCEPTED
        self.metrics_queue.put(metrics | ({f"farm/n_dropped_{decision.value}_total": 1.0} if dropped else {}))
        if dropped:
            return
        for row in group_rows(rollouts, scaled=self._scaled):
            self._put(self._sample(row, number, begun_with))

    def _put(self, sample: Any) -> None:
        while not self._over.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=_PUT_S)
            except queue.Full:
                continue

    def _sample(self, row: GroupRow, number: int, begun_with: int) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        segment, n_prompt = row.segment, len(row.segment.prompt_ids)
        version, _ = segment.version_span
        of_prompt = np.zeros(n_prompt, np.int64)
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.concatenate([segment.prompt_ids, segment.response_ids]).astype(np.int64),
            completion_mask=np.concatenate([of_prompt, segment.response_mask]).astype(np.int64),
            old_log_probs=np.concatenate([of_prompt, segment.response_logprobs]).astype(np.float32),
            advantage=row.advantage,
            model_version=version if version >= 0 else begun_with,
            group_id=number,
            metrics={"reward": float(row.rollout.reward or 0.0), "reward_std": row.reward_std},
        )


def _sampler(instances: Iterable[Instance] | InstanceSampler) -> InstanceSampler:
    if hasattr(instances, "draw"):
        return cast(InstanceSampler, instances)
    return ShuffledInstances(list(instances), shuffle=False)


@dataclass
class FarmWeightTransfer:
    """A `WeightTransferProtocol` of AsyncGRPOTrainer: each sync is a weight update of the farm's engines.

    `push(engines, parameters)` transfers the (name, tensor) pairs to the engines. Versions are counted like the
    trainer's, from 1 for the first sync.
    """

    client: Farm
    push: Callable[[Sequence[StoredEngine], Iterator[tuple[str, Any]]], object]
    mode: PauseMode = "keep"
    _version: int = field(default=0, init=False)
    _update: ExitStack = field(default_factory=ExitStack, init=False)
    _engines: Sequence[StoredEngine] = field(default=(), init=False)

    def init_weight_transfer(self) -> None:
        """Do nothing: the farm knows its engines."""

    def pause(self) -> None:
        """Pause the engines for the next version."""
        self._version += 1
        self._engines = self._update.enter_context(self.client.weight_update(self._version, self.mode))

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push the weights. If that fails, the engines stay paused, as they may be half written."""
        try:
            self.push(self._engines, iterator)
        except BaseException as error:
            self._update.__exit__(type(error), error, error.__traceback__)
            raise

    def resume(self) -> None:
        """Name the version and resume the engines."""
        self._update.close()

    def destroy(self) -> None:
        """Do nothing: no resources are held between updates."""
