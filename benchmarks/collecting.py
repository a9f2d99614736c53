"""Wasted rollouts of four ways to collect groups with variance, on one seeded workload in simulated time.

A step wants so many groups whose rewards differ. Instances have a rate at which they are solved, many of them never or
always, and rollouts have long tails; so many are played at a time. Every way plays the same instances in the same
order, and a sample of an instance has the same reward and length in all of them:

* naive: whole batches, one after the other, until enough of their groups differ (verl's DAPO recipe); what is beyond
  the step is thrown away. Over-sampled by half, so that one batch mostly is enough.
* ProRL: places are refilled at once, what is left is ended when the step is full, and unfinished instances are put
  back into the queue: their finished samples are thrown away and played again (its trainer's rule, simulated).
* cancel, carry over: `farm.collecting.StepCollector` on a SQLite store, as it is. Only time and rollouts are simulated.

A rollout is wasted if its group trains nothing, but not for equal rewards, which no way knows beforehand. Seconds are
those that rollouts hold a place. Between two steps the trainer trains for a while: engines of the first three then
stand still.
"""

from __future__ import annotations

import heapq
import json
import random
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from farm.client.local import LocalFarm
from farm.collecting import CollectingOptions, ShuffledInstances, StepCollector
from farm.notifications import Signals
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
    """Return the rate at which samples of an instance are right: 0 for a quarter, 1 for a fifth."""
    drawn = random.Random(f"{_SEED}:{instance}")
    kind = drawn.random()
    return 0.0 if kind < 0.25 else 1.0 if kind > 0.8 else drawn.betavariate(1.0, 1.5)


@cache
def sample_of(instance: int, sample: int, play: int) -> tuple[float, float]:
    """Return the reward and the seconds of a sample, the `play`th time that it is played."""
    drawn = random.Random(f"{_SEED}:{instance}:{sample}:{play}")
    return float(drawn.random() < solve_rate(instance)), drawn.lognormvariate(3.7, 0.8)


@dataclass(slots=True)
class Totals:
    """The counts of one way. Rollouts that were ended before they had finished count in seconds only."""

    n_finished: int = 0
    n_equal: int = 0
    n_trained: int = 0
    played_s: float = 0.0
    equal_s: float = 0.0
    trained_s: float = 0.0
    n_replayed: int = 0
    wall_s: float = 0.0
    steps_behind: list[int] = field(default_factory=list)

    def ends(self, rewards: list[float], seconds: float, trains: bool) -> None:
        """Count a whole group that is chosen, has equal rewards, or is thrown away."""
        if trains:
            self.n_trained += len(rewards)
            self.trained_s += seconds
        elif len(set(rewards)) < 2:
            self.n_equal += len(rewards)
            self.equal_s += seconds

    def row(self) -> dict[str, float]:
        n_wasted = self.n_finished - self.n_trained - self.n_equal
        wasted_s = self.played_s - self.trained_s - self.equal_s
        return {
            "finished rollouts": self.n_finished,
            "trained": self.n_trained,
            "equal rewards": self.n_equal,
            "wasted": n_wasted,
            "of them played again": self.n_replayed,
            "wasted of played seconds, %": 100 * wasted_s / self.played_s,
            "played seconds a trained rollout": self.played_s / self.n_trained,
            "minutes": self.wall_s / 60,
            "steps behind, mean": sum(self.steps_behind) / max(1, len(self.steps_behind)),
        }


Member = tuple[int, int, int]
"""A sample on its way: instance, number of the sample, number of the play."""


class Places:
    """Places in which samples are played, first come first served; `now` is simulated time."""

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
        """Go on to the next end of a sample."""
        self.now, started, member = heapq.heappop(self.running)
        self._totals.n_finished += 1
        self._totals.played_s += self.now - started
        self.fill()
        return member

    def end_all(self) -> None:
        """End what is played, and forget what is queued."""
        self._totals.played_s += sum(self.now - started for _, started, _ in self.running)
        self.running.clear()
        self.queue.clear()


def _samples(instance: int, play: int = 0) -> list[Member]:
    return [(instance, sample, play) for sample in range(N_SAMPLES)]


def _group(instance: int, play: int = 0) -> tuple[list[float], float]:
    samples = [sample_of(*member) for member in _samples(instance, play)]
    return [reward for reward, _ in samples], sum(seconds for _, seconds in samples)


def naive(n_steps: int, factor: float) -> Totals:
    """Play whole batches of `factor` times a step until enough of their groups differ."""
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
                rewards, seconds = _group(instance)
                trains = len(set(rewards)) > 1 and n_chosen < N_GROUPS
                n_chosen += trains
                totals.ends(rewards, seconds, trains)
        totals.steps_behind += [0] * N_GROUPS
        places.now += TRAIN_S
    totals.wall_s = places.now
    return totals


def prorl(n_steps: int) -> Totals:
    """Refill places at once, end what is left, and play unfinished instances again from their beginning."""
    totals = Totals()
    places, fresh = Places(totals), iter(range(N_INSTANCES))
    waiting: deque[tuple[int, int]] = deque()
    for _ in range(n_steps):
        n_chosen, n_ended = 0, defaultdict[tuple[int, int], int](int)
        open_instances: dict[int, int] = {}
        while n_chosen < N_GROUPS:
            while len(places.queue) < N_SAMPLES:
                instance, play = waiting.popleft() if waiting else (next(fresh), 0)
                open_instances[instance] = play
                places.queue.extend(_samples(instance, play))
                places.fill()
            instance, _, play = places.next_end()
            n_ended[instance, play] += 1
            if n_ended[instance, play] == N_SAMPLES:
                del open_instances[instance]
                rewards, seconds = _group(instance, play)
                n_chosen += len(set(rewards)) > 1
                totals.ends(rewards, seconds, len(set(rewards)) > 1)
        totals.n_replayed += sum(n_ended[instance, play] for instance, play in open_instances.items())
        waiting.extendleft((instance, play + 1) for instance, play in reversed(open_instances.items()))
        places.end_all()
        totals.steps_behind += [0] * N_GROUPS
        places.now += TRAIN_S
    totals.wall_s = places.now
    return totals


class SimulatedFarm:
    """A store whose rollouts are played in simulated time, in as many places, whenever the collector waits."""

    def __init__(self, store: Store, totals: Totals) -> None:
        self._totals = totals
        self.places = Places(totals)
        self._members: dict[Member, QueuedRollout] = {}
        self._seen: set[str] = set()
        self._n_ended: defaultdict[int, int] = defaultdict(int)
        self.scripted = ScriptedRollouts(
            store, lambda rollout: sample_of(_number(rollout), rollout.sample_index, 0)[0], ["simulated"]
        )

    def take(self) -> None:
        """Take what was submitted, and leave what was cancelled."""
        queued = {(_number(each), each.sample_index, 0): each for each in self.scripted.queued()}
        for _, started, member in self.places.running:
            if member not in queued:
                self._totals.played_s += self.places.now - started
        self.places.running = [each for each in self.places.running if each[2] in queued]
        heapq.heapify(self.places.running)
        self.places.queue = deque(member for member in self.places.queue if member in queued)
        for member, rollout in queued.items():
            if rollout.rollout_id not in self._seen:
                self._seen.add(rollout.rollout_id)
                self.places.queue.append(member)
        self._members = queued
        self.places.fill()

    def until_a_group_ends(self, seconds: float = 0.0) -> None:
        """Play until some group has ended: nothing else makes a difference to a collector."""
        self.take()
        ended: list[QueuedRollout] = []
        while self.places.running:
            member = self.places.next_end()
            ended.append(self._members[member])
            self._n_ended[member[0]] += 1
            if self._n_ended[member[0]] == N_SAMPLES:
                rewards, group_s = _group(member[0])
                if len(set(rewards)) < 2:
                    self._totals.ends(rewards, group_s, False)
                break
        self.scripted.finish(ended)

    def trains(self) -> None:
        """Let the trainer train: what is in flight goes on."""
        self.take()
        until = self.places.now + TRAIN_S
        ended: list[QueuedRollout] = []
        while self.places.running and self.places.running[0][0] <= until:
            member = self.places.next_end()
            ended.append(self._members[member])
            self._n_ended[member[0]] += 1
            if self._n_ended[member[0]] == N_SAMPLES:
                rewards, group_s = _group(member[0])
                if len(set(rewards)) < 2:
                    self._totals.ends(rewards, group_s, False)
        self.places.now = until
        self.scripted.finish(ended)


def ours(n_steps: int, collecting: CollectingOptions) -> Totals:
    """Collect by the farm's own collector."""
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
        for step in range(n_steps):
            collected = collector.collect(step)
            for group in collected.groups:
                rewards, seconds = _group(int(group.rollouts[0].instance_id.removeprefix("i-")))
                totals.ends(rewards, seconds, True)
            totals.steps_behind += [1] * collected.n_carried + [0] * (N_GROUPS - collected.n_carried)
            simulated.trains()
        totals.wall_s = simulated.places.now
        store.close()
    return totals


def _number(rollout: QueuedRollout) -> int:
    return int(rollout.instance_id.removeprefix("i-"))


def ways(n_steps: int) -> Iterator[tuple[str, Callable[[], Totals]]]:
    """Yield the ways to collect, by name."""
    # of a group's samples the slowest is played for long: with three times as many groups no place stays free
    in_flight = 3 * N_PLACES // N_SAMPLES
    yield "naive", lambda: naive(n_steps, 1.0)
    yield "naive, over-sampled", lambda: naive(n_steps, 1.5)
    yield "ProRL", lambda: prorl(n_steps)
    cancel = CollectingOptions(N_GROUPS, gen_batch_size=1, max_inflight_groups=in_flight)
    yield "farm, cancel", lambda: ours(n_steps, cancel)
    carry_over = CollectingOptions(
        N_GROUPS, gen_batch_size=1, max_inflight_groups=in_flight, leftovers="carry_over", max_staleness=1
    )
    yield "farm, carry over", lambda: ours(n_steps, carry_over)


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
    Console(width=140).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
