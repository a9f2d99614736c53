"""A training run on a real store, whose rollouts get scripted results whenever the trainer waits, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from farm.client.farm import Farm
from farm.client.local import LocalFarm
from farm.collecting import CollectedStep, CollectingOptions, InstanceSampler, ShuffledInstances, StepCollector
from farm.notifications import Signals
from farm.store.database import Store
from testkit.scripted_rollouts import QueuedRollout, ScriptedRollouts

N_SAMPLES = 2
EQUAL, MIXED, BROKEN = (1.0, 1.0), (0.0, 1.0), (1.0, None)


def problems(n: int, source: str = "algebra") -> list[dict[str, Any]]:
    return [{"data_source": source, "instance_id": f"{source}-{i}", "fields": {"i": i}} for i in range(n)]


def local_farm(store: Store) -> LocalFarm:
    return LocalFarm(store, Signals(""), 100_000)


class ScriptedRun:
    """The run `r` of a data set in order; `kinds` are the rewards of its instances, all others have `MIXED`."""

    def __init__(self, store: Store, kinds: dict[int, tuple[float | None, ...]], n_instances: int = 200) -> None:
        self.store = store
        self.client = local_farm(store)
        self.sampler: InstanceSampler = ShuffledInstances(problems(n_instances), shuffle=False)
        self.scripted = ScriptedRollouts(store, lambda rollout: self._reward(rollout), ["algebra", "geometry"])
        self.kinds = kinds

    def _reward(self, rollout: QueuedRollout) -> float | None:
        number = int(rollout.instance_id.rpartition("-")[2])
        return self.kinds.get(number, MIXED)[rollout.sample_index]

    def complete_group(self, seconds: float = 0.0) -> None:
        self.scripted.run_next(N_SAMPLES)

    def collector(
        self, run: str = "r", client: Farm | None = None, wait: Callable[[float], object] | None = None, **options: Any
    ) -> StepCollector:
        values = {"train_batch_size": 3, "gen_batch_size": 1, **options}
        accept, n_samples = values.pop("accept", None), values.pop("n_samples", N_SAMPLES)
        return StepCollector(
            client or self.client,
            run,
            self.sampler,
            CollectingOptions(**values),
            {"n_samples": n_samples},
            accept=accept,
            wait=wait or self.complete_group,
        )

    def set_version(self, version: int) -> None:
        """Name the weights of later rollouts."""
        self.client.add_engine("http://engine/v1")
        self.client.orders.order_version(str(version), None)
        self.scripted.version = version

    def n_samples_run(self) -> dict[str, int]:
        """Return the number of completed rollouts of each instance."""
        counts: dict[str, int] = {}
        for rollout_id in self.scripted.finished:
            name = self.client.rollout(rollout_id).instance_id
            counts[name] = counts.get(name, 0) + 1
        return counts


def numbers(step: CollectedStep) -> list[int]:
    """Return the instances of a step's groups, by their places in the data set."""
    return [int(group.rollouts[0].instance_id.rpartition("-")[2]) for group in step.groups]


def states(client: Farm, batch_ids: Sequence[str]) -> list[str]:
    return [str(rollout.state) for batch_id in batch_ids for rollout in client.rollouts(batch_id)]


class ProcessKilled(Exception):
    """Represents the end of the trainer's process."""


class KilledClient:
    """A real client whose process ends at a moment: right after a write, or after a wait in which rollouts ended.

    A resumed process finds its state in the store, so between two of these moments it makes no difference when the
    previous process ended.
    """

    WRITES = ("submit", "cancel", "record_step")

    def __init__(self, client: Any, moments: Iterator[int], number: int) -> None:
        self._client = client
        self._moments = moments
        self._number = number

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if name == "runs":
            return KilledClient(value, self._moments, self._number)
        return self.killable(value) if name in self.WRITES else value

    def killable(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = act(*args, **kwargs)
            if next(self._moments) == self._number:
                raise ProcessKilled
            return result

        return call
