"""Wasted rollouts of several ways to collect groups with variance, on one seeded workload in simulated time.

A step needs a number of groups whose rewards differ. Instances have a solve rate, often 0 or 1, and rollouts have long
tails; a fixed number of them runs at a time. Every way uses the same instances in the same order, and a sample of an
instance has the same reward and length in all of them, the n-th time that it runs:

* naive: whole batches, one after the other, until enough of their groups differ (verl's DAPO recipe); groups beyond the
  step are discarded. Over-sampled by half, so that one batch mostly is enough.
* ProRL: places are refilled at once; when the step is full, running rollouts are cancelled, and unfinished instances
  are queued again: their finished samples are discarded and repeated (its trainer's rule, simulated).
* farm: the real `farm.collecting.StepCollector` on a SQLite store; only time and rollouts are simulated. By default it
  is on-policy, and cancels leftover rollouts; one step behind, it carries them over. With 24 groups in flight no place
  stays free, as a group waits long for its slowest sample; `cancel` then keeps finished samples for the next step.

A rollout is wasted if its group trains nothing, except for equal rewards, which no way can know beforehand. Seconds are
the times that rollouts hold a place. Between two steps the trainer trains for a while: engines are idle then, except
for rollouts that are carried over. Lengths are those of the groups that train, compared with those of all requested
groups whose rewards differ, at their first run: a way that trains shorter ones has a bias towards short rollouts.
"""

from __future__ import annotations

import heapq
import json
import random
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from farm.client.farm import Farm
from farm.client.local import LocalFarm
from farm.collecting import CollectingOptions, ShuffledInstances, StepCollector
from farm.collecting.waves import Wave, wave_key
from farm.ids import batch_of
from farm.notifications import Signals
from farm.records.rollout import State
from farm.store import migrations
from farm.store.database import Store
from testkit.report import options
from testkit.scripted_rollouts import QueuedRollout, ScriptedRollouts

N_GROUPS = 16
N_SAMPLES = 8
N_PLACES = 64
N_INSTANCES = 4000
TRAIN_S = 120.0
_SEED = 14


@cache
def solve_rate(instance: int) -> float:
    """Return the solve rate of an instance: 0 for a quarter of them, 1 for a fifth."""
    drawn = random.Random(f"{_SEED}:{instance}")
    kind = drawn.random()
    return 0.0 if kind < 0.25 else 1.0 if kind > 0.8 else drawn.betavariate(1.0, 1.5)


@cache
def sample_of(instance: int, sample: int, repeat: int) -> tuple[float, float]:
    """Return the reward and the seconds of a sample, when it runs for the `repeat`th time."""
    drawn = random.Random(f"{_SEED}:{instance}:{sample}:{repeat}")
    return float(drawn.random() < solve_rate(instance)), drawn.lognormvariate(3.7, 0.8)


@dataclass(slots=True)
class Totals:
    """The counts of one way. Rollouts that were cancelled count only in seconds."""

    n_finished: int = 0
    n_equal: int = 0
    n_trained: int = 0
    run_s: float = 0.0
    equal_s: float = 0.0
    trained: list[list[float]] = field(default_factory=list)
    requested: set[int] = field(default_factory=set)
    n_replayed: int = 0
    wall_s: float = 0.0
    steps_behind: list[int] = field(default_factory=list)

    def ends(self, samples: list[Sample], trains: bool) -> None:
        """Count a complete group that trains, has equal rewards, or is discarded."""
        seconds = [seconds for _, seconds in samples]
        if trains:
            self.n_trained += len(samples)
            self.trained.append(seconds)
        elif not _differ(samples):
            self.n_equal += len(samples)
            self.equal_s += sum(seconds)

    def row(self) -> dict[str, float]:
        requested = [[seconds for _, seconds in group] for each in self.requested if _differ(group := _group(each))]
        trained_s = sum(map(sum, self.trained))
        n_wasted = self.n_finished - self.n_trained - self.n_equal
        wasted_s = self.run_s - trained_s - self.equal_s
        return {
            "finished rollouts": self.n_finished,
            "trained": self.n_trained,
            "equal rewards": self.n_equal,
            "wasted": n_wasted,
            "of them run again": self.n_replayed,
            "wasted of run seconds, %": 100 * wasted_s / self.run_s,
            "run seconds per trained rollout": self.run_s / self.n_trained,
            "minutes": self.wall_s / 60,
            "steps behind, mean": fmean(self.steps_behind),
            "seconds of a sample that trains": fmean(chain(*self.trained)),
            "of one that was requested": fmean(chain(*requested)),
            "seconds of the slowest of a group that trains": fmean(map(max, self.trained)),
            "of one that was requested, slowest": fmean(map(max, requested)),
        }


Sample = tuple[float, float]
"""Its reward and its seconds."""

Member = tuple[int, int, int]
"""A running sample: instance, number of the sample, number of the run."""


class Places:
    """Places in which samples run, first come first served; `now` is simulated time."""

    def __init__(self, totals: Totals) -> None:
        self.now = 0.0
        self.queue: deque[Member] = deque()
        self.running: list[tuple[float, float, Member]] = []
        self._totals = totals

    def fill(self) -> None:
        while self.queue and len(self.running) < N_PLACES:
            member = self.queue.popleft()
            heapq.heappush(self.running, (self.now + sample_of(*member)[1], self.now, member))

    def next_end(self) -> Member:
        """Advance to the next end of a sample."""
        self.now, started, member = heapq.heappop(self.running)
        self._totals.n_finished += 1
        self._totals.run_s += self.now - started
        self.fill()
        return member

    def end_all(self) -> None:
        """Cancel running and queued samples."""
        self._totals.run_s += sum(self.now - started for _, started, _ in self.running)
        self.running.clear()
        self.queue.clear()


def _samples(instance: int, repeat: int = 0) -> list[Member]:
    return [(instance, sample, repeat) for sample in range(N_SAMPLES)]


def _group(instance: int, repeat: int = 0) -> list[Sample]:
    return [sample_of(*member) for member in _samples(instance, repeat)]


def _differ(samples: list[Sample]) -> bool:
    return len({reward for reward, _ in samples}) > 1


def naive(n_steps: int, factor: float) -> Totals:
    """Run whole batches of `factor` times a step until enough of their groups differ."""
    totals = Totals()
    places, fresh = Places(totals), iter(range(N_INSTANCES))
    for _ in range(n_steps):
        n_chosen = 0
        while n_chosen < N_GROUPS:
            batch = [next(fresh) for _ in range(round(N_GROUPS * factor))]
            places.queue.extend(member for instance in batch for member in _samples(instance))
            places.fill()
            while places.running:
                places.next_end()
            for instance in batch:
                trains = _differ(_group(instance)) and n_chosen < N_GROUPS
                n_chosen += trains
                totals.ends(_group(instance), trains)
                totals.requested.add(instance)
        totals.steps_behind.append(0)
        places.now += TRAIN_S
    totals.wall_s = places.now
    return totals


def prorl(n_steps: int) -> Totals:
    """Refill places at once, cancel leftover samples, and repeat unfinished instances from their beginning."""
    totals = Totals()
    places, fresh = Places(totals), iter(range(N_INSTANCES))
    waiting: deque[tuple[int, int]] = deque()
    for _ in range(n_steps):
        n_chosen, n_ended = 0, defaultdict[tuple[int, int], int](int)
        open_instances: dict[int, int] = {}
        while n_chosen < N_GROUPS:
            while len(places.queue) < N_SAMPLES:
                instance, repeat = waiting.popleft() if waiting else (next(fresh), 0)
                open_instances[instance] = repeat
                totals.requested.add(instance)
                places.queue.extend(_samples(instance, repeat))
                places.fill()
            instance, _, repeat = places.next_end()
            n_ended[instance, repeat] += 1
            if n_ended[instance, repeat] == N_SAMPLES:
                del open_instances[instance]
                trains = _differ(_group(instance, repeat))
                n_chosen += trains
                totals.ends(_group(instance, repeat), trains)
        totals.n_replayed += sum(n_ended[instance, repeat] for instance, repeat in open_instances.items())
        waiting.extendleft((instance, repeat + 1) for instance, repeat in reversed(open_instances.items()))
        places.end_all()
        totals.steps_behind.append(0)
        places.now += TRAIN_S
    totals.wall_s = places.now
    return totals


class SimulatedFarm:
    """A store whose rollouts run in simulated time, in the same number of places, whenever the collector waits."""

    def __init__(self, store: Store, totals: Totals) -> None:
        self._totals = totals
        self.places = Places(totals)
        self._queued: dict[Member, QueuedRollout] = {}
        self.member_of: dict[str, Member] = {}
        self._batches: defaultdict[int, list[str]] = defaultdict(list)
        self._n_left: Counter[tuple[str, int]] = Counter()
        self.scripted = ScriptedRollouts(store, lambda rollout: self.sample(rollout.rollout_id)[0], ["simulated"])

    def sample(self, rollout_id: str) -> Sample:
        return sample_of(*self.member_of[rollout_id])

    def take(self) -> None:
        """Start submitted rollouts, and drop cancelled ones."""
        fresh = []
        queued = self.scripted.queued()
        for each in queued:
            if each.rollout_id not in self.member_of:
                self.member_of[each.rollout_id] = self._new_member(each)
                self._n_left[each.batch_id, each.group_index] += 1
                fresh.append(self.member_of[each.rollout_id])
        self._queued = {self.member_of[each.rollout_id]: each for each in queued}
        for _, started, member in self.places.running:
            if member not in self._queued:
                self._totals.run_s += self.places.now - started
        self.places.running = [each for each in self.places.running if each[2] in self._queued]
        heapq.heapify(self.places.running)
        self.places.queue = deque(member for member in self.places.queue if member in self._queued)
        self.places.queue.extend(fresh)
        self.places.fill()

    def _new_member(self, rollout: QueuedRollout) -> Member:
        instance = int(rollout.instance_id.removeprefix("i-"))
        self._totals.requested.add(instance)
        if rollout.batch_id not in self._batches[instance]:
            self._batches[instance].append(rollout.batch_id)
        return instance, rollout.sample_index, len(self._batches[instance]) - 1

    def until_a_group_ends(self, seconds: float = 0.0) -> None:
        """Run until some group has ended: nothing else matters to a collector."""
        self.take()
        ended: list[QueuedRollout] = []
        while self.places.running and not (ended and self._ends(ended[-1])):
            ended.append(self._queued[self.places.next_end()])
        self.scripted.finish(ended)

    def _ends(self, rollout: QueuedRollout) -> bool:
        """Count an ended rollout, and return whether its group has ended."""
        self._n_left[rollout.batch_id, rollout.group_index] -= 1
        return self._n_left[rollout.batch_id, rollout.group_index] == 0

    def trains(self) -> None:
        """Simulate the trainer's training: rollouts in flight continue."""
        self.take()
        until = self.places.now + TRAIN_S
        ended: list[QueuedRollout] = []
        while self.places.running and self.places.running[0][0] <= until:
            ended.append(self._queued[self.places.next_end()])
            self._ends(ended[-1])
        self.places.now = until
        self.scripted.finish(ended)


def ours(n_steps: int, collecting: CollectingOptions) -> Totals:
    """Collect with the farm's own collector."""
    totals = Totals()
    problems = [{"data_source": "simulated", "instance_id": f"i-{i}", "fields": {}} for i in range(N_INSTANCES)]
    with tempfile.TemporaryDirectory(prefix="farm-collecting-") as folder:
        store = Store(f"sqlite:///{Path(folder) / 'farm.db'}")
        migrations.migrate(store)
        simulated = SimulatedFarm(store, totals)
        client = LocalFarm(store, Signals(""), 1_000_000)
        sampler = ShuffledInstances(problems, shuffle=False)
        collector = StepCollector(
            client, "r", sampler, collecting, {"n_samples": N_SAMPLES}, wait=simulated.until_a_group_ends
        )
        steps = []
        for step in range(n_steps):
            steps.append(collector.collect(step))
            simulated.trains()
        totals.wall_s = simulated.places.now
        waves = list(_waves(client))
        step_of = {wave.batch_id: wave.step for wave in waves}
        for collected in steps:
            for group in collected.groups:
                totals.ends([simulated.sample(each.rollout_id) for each in group.rollouts], True)
            behind = [collected.step - step_of[batch_of(each.rollout_id)] for each in collected.rollouts]
            totals.steps_behind += behind
        whole = {group.group_id: group for wave in waves for group in wave.whole.values()}
        for group in whole.values():
            if not any(each.state is State.CANCELLED for each in group.rollouts):
                totals.ends([simulated.sample(each.rollout_id) for each in group.rollouts], False)
        for requeued in chain(*(wave.requeued for wave in waves)):
            n_finished = sum(each.state is State.COMPLETED for each in whole[requeued.group_id].rollouts)
            totals.n_replayed += n_finished - len(requeued.kept)
        store.close()
    return totals


def _waves(client: Farm) -> Iterator[Wave]:
    """Yield all waves of the run, each with its ended groups."""
    for number in count():
        for batch in (known := client.runs.keyed_batches([wave_key("r", number)])):
            wave = Wave.of(number, batch)
            wave.poll(client, batch.cursor)
            yield wave
        if not known:
            return


def ways(n_steps: int) -> Iterator[tuple[str, Callable[[], Totals]]]:
    """Yield the ways to collect, by name."""
    yield "naive", lambda: naive(n_steps, 1.0)
    yield "naive, over-sampled", lambda: naive(n_steps, 1.5)
    yield "ProRL", lambda: prorl(n_steps)
    # the slowest sample of a group runs for long: with three times as many groups no place stays free
    full: dict[str, Any] = {"gen_batch_size": 1, "max_inflight_groups": 3 * N_PLACES // N_SAMPLES}
    of: dict[str, dict[str, Any]] = {
        "farm": {},
        "farm, 24 in flight": full,
        "farm, 1 behind": {"max_staleness": 1},
        "farm, 1 behind, 24": full | {"max_staleness": 1},
        "farm, 1 behind, 24, cancel": full | {"max_staleness": 1, "leftovers": "cancel"},
    }
    for name, options_of in of.items():
        yield name, partial(ours, n_steps, CollectingOptions(N_GROUPS, **options_of))


def main() -> None:
    arguments = options(__doc__)
    n_steps = 5 if arguments.quick else 20
    rows = {name: collect().row() for name, collect in ways(n_steps)}
    title = f"{n_steps} steps of {N_GROUPS} groups of {N_SAMPLES}, {N_PLACES} places, {TRAIN_S:g} s of training a step"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    for figure in next(iter(rows.values())):
        table.add_row(figure, *(f"{row[figure]:.4g}" for row in rows.values()))
    Console(width=190).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
