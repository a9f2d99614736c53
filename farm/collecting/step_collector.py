"""The collector of a training run: requests fresh instances until a step has its groups, and records them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from farm.client.farm import Farm
from farm.collecting.instance_samplers import InstanceSampler, SamplerState
from farm.collecting.options import CollectingOptions
from farm.collecting.waves import (
    METADATA,
    AcceptGroup,
    CollectedStep,
    GroupDecision,
    Lengths,
    RequeuedGroup,
    Wave,
    checked_fields,
    chosen_groups,
    decide,
    of_instance,
    stopped,
    too_old,
    usable,
    wave_key,
    wave_metadata,
)
from farm.errors import Conflict, FarmError, InvalidRequest, Overloaded, StoreWentBack
from farm.ids import RolloutRef, group_id
from farm.records.rollout import Group, Rollout
from farm.records.training_run import RecordedStep, check_own_key, check_run
from farm.seeds import step_seed

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LOOK_AHEAD = 32
"""Waves looked up at a time if a predecessor may have submitted some."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The waiting groups, oldest wave first: those accepted, and those whose instances are to be requeued."""

    accepted: Sequence[tuple[Wave, Group]] = ()
    to_requeue: Sequence[tuple[Wave, Group, RequeuedGroup]] = ()


class StepCollector:
    """Collects the steps of a run, one after the other; see `farm.collecting`.

    `request` are the other fields of `farm.BatchRequest`: `n_samples`, `sampling`, `limits`, `model` … `accept` is the
    trainer's own rule for groups. `wait` is called between two reads of the store.

    Set the weight version of a step (`weight_update`) before it is collected. Safe to use from several threads, but one
    collects at a time. Raises InvalidRequest that names the option.
    """

    def __init__(
        self,
        client: Farm,
        run: str,
        sampler: InstanceSampler,
        options: CollectingOptions,
        request: Mapping[str, Any],
        *,
        accept: AcceptGroup | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        check_run(run)
        self._client = client
        self._run = run
        self._sampler = sampler
        self.options = options
        self._request = checked_fields(request, options)
        self._least = options.check_samples(self._request.n_samples)
        self._accept = accept
        self._wait = wait
        self._collecting = threading.Lock()
        self._lock = threading.RLock()
        self._base: RecordedStep | None = None
        self._is_resumed = False
        self._waves: list[Wave] = []
        self._state: SamplerState = {}
        self._step = self._due = 0
        self._next = 0
        self._n_requested = 0
        self._requeued: list[RequeuedGroup] = []
        self._n_dropped: Counter[str] = Counter()

    def collect(self, step: int, timeout_s: float | None = None) -> CollectedStep:
        """Return the groups of a step: the recorded ones, or the first that are accepted now.

        Raises InvalidRequest if it requested `max_num_gen_batches` and found too few groups, or for a step before a
        collected one; TimeoutError if the groups are not complete after `timeout_s` seconds. Nothing is lost then:
        finished rollouts count when the step is collected again.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidRequest(f"must be a whole number, 0 or more, not {step!r}", field="step")
        with self._collecting:
            return self._collect(step, timeout_s)

    def _collect(self, step: int, timeout_s: float | None) -> CollectedStep:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            base = self._client.runs.recorded_step(self._run, step)
            if base is not None and base.step == step:
                return self._recorded(base)
            self._check_is_next(step)
            self._resume(base)
            self._step = self._due = step
        while True:
            with self._lock:
                look = self._look(step)
                accepted = look.accepted
                if len(accepted) >= self.options.train_batch_size:
                    return self._decide(step, accepted[: self.options.train_batch_size])
                self._ask(look)
                self._check_can_go_on(len(accepted))
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"step {step} of run {self._run}: {len(accepted)} of {self.options.train_batch_size} groups "
                    f"after {timeout_s:g} s; dropped: {dict(self._n_dropped)}"
                )
            self._wait(_POLL_S)

    def keep_ahead(self) -> None:
        """Request groups for the steps after the last one, as far as they can train in time; see `Producer`."""
        with self._lock:
            if not self._is_resumed:
                base = self._client.runs.recorded_step(self._run)
                if base is None:
                    # the trainer determines the first step of a run
                    return
                self._resume(base)
            self._ask(self._look(self._due))

    def _check_is_next(self, step: int) -> None:
        newest = self._client.runs.recorded_step(self._run)
        if newest is not None and newest.step > step:
            raise InvalidRequest(
                f"run {self._run} has collected step {newest.step}, and nothing is recorded for {step}: steps go up; "
                "use a new run name",
                field="step",
            )

    def _resume(self, base: RecordedStep | None) -> None:
        """Continue from a step's record and the waves submitted after it, or from memory if it has that record."""
        if self._is_resumed and (self._base and self._base.step) == (base and base.step):
            return
        record = base.record if base is not None else {}
        for batch_id in record.get("cancelled", ()):
            # the process that recorded it may have been killed before this
            self._client.cancel(batch_id)
        self._base = base
        if base is not None:
            self._step, self._due = base.step, base.step + 1
        self._state, self._next = record.get("sampler", {}), record.get("next_wave", 0)
        self._waves = [Wave.from_record(values) for values in record.get("open", ())]
        self._n_requested, self._requeued, self._n_dropped = 0, [], Counter()
        self._adopt()
        self._is_resumed = True

    def _adopt(self) -> None:
        """Take over waves submitted by a predecessor or another trainer after the known ones."""
        while True:
            numbers = {wave_key(self._run, number): number for number in range(self._next, self._next + _LOOK_AHEAD)}
            known = self._client.runs.keyed_batches(list(numbers))
            for batch in known:
                if numbers[batch.key] == self._next:
                    self._add(Wave.of(self._next, batch), batch.metadata[METADATA]["sampler"])
            if len(known) < _LOOK_AHEAD:
                return

    def _add(self, wave: Wave, state: SamplerState) -> None:
        self._waves.append(wave)
        self._state = state
        self._next = wave.number + 1
        self._n_requested += wave.n_groups
        by_batch = {each.batch_id: each for each in self._waves}
        for index, requeued in enumerate(wave.requeued):
            old = RolloutRef.of(requeued.group_id)
            origin = by_batch.get(old.batch_id)
            if origin is not None and old.group_index is not None and old.group_index not in origin.settled:
                origin.settle(old.group_index)
                self._requeued.append(requeued)
            elif index not in wave.settled:
                # another trainer of this run chose it meanwhile
                self._client.cancel(group_id(wave.batch_id, index))
                wave.settle(index)

    def _look(self, step: int) -> _Look:
        """Take ended groups, and drop those whose samples say so."""
        by_key = {wave_key(self._run, wave.number): wave for wave in self._waves}
        for some in _chunks(list(by_key)):
            known = {batch.key: batch for batch in self._client.runs.keyed_batches(some)}
            for key in some:
                if key not in known:
                    raise StoreWentBack(
                        f"batch {by_key[key].batch_id} of run {self._run} existed and is gone: the "
                        "database went back in time; continue from an older step"
                    )
                if (enough := self.options.early_stop_samples) is not None:
                    by_key[key].cut(self._client, known[key].cursor, enough)
                by_key[key].poll(self._client, known[key].cursor)
        if not any(wave.whole for wave in self._waves):
            return _Look()
        newest = self._client.newest_version() if self.options.max_staleness is not None else ""
        accepted, to_requeue = [], []
        for wave in self._waves:
            for index, group in list(wave.whole.items()):
                decision = wave.decisions.get(index) or self._decision(group)
                wave.decisions[index] = decision
                young = [each for each in group.rollouts if usable(each) and self._is_young(each, wave, step, newest)]
                if decision is GroupDecision.ACCEPTED and len(young) < sum(map(usable, group.rollouts)):
                    decision = GroupDecision.STALE
                if decision is GroupDecision.ACCEPTED:
                    accepted.append((wave, group))
                elif not decision.is_final:
                    kept = tuple((each.rollout_id, wave.step_of(each)) for each in young)
                    lengths = Lengths.of_requested([group], [rollout_id for rollout_id, _ in kept])
                    to_requeue.append((wave, group, RequeuedGroup(group.group_id, kept, lengths)))
                else:
                    self._n_dropped[decision.value] += 1
                    wave.settle(index)
        self._waves = [wave for wave in self._waves if not wave.is_settled]
        return _Look(accepted, to_requeue)

    def _is_young(self, rollout: Rollout, wave: Wave, step: int, newest: str) -> bool:
        return not too_old(rollout, newest, step - wave.step_of(rollout), self.options.max_staleness)

    def _decision(self, group: Group) -> GroupDecision:
        filtered = self.options.filter_groups == "drop"
        is_stopped = stopped(group, self._least, self.options.early_stop_samples)
        return is_stopped or decide(group, self._least, filtered=filtered, accept=self._accept)

    def _ask(self, look: _Look) -> None:
        """Submit waves while there is room: first those of requeued instances."""
        n_accepted, waiting = len(look.accepted), list(look.to_requeue)
        while True:
            n_kept = len(waiting[0][2].kept) if waiting else 0
            # a batch has one number of samples for all of its instances
            requeued = [each for _, _, each in waiting if len(each.kept) == n_kept][: self.options.wave_size]
            most = self._most_in_flight(n_accepted)
            size = len(requeued) or min(self.options.wave_size, most)
            if not self._has_room(n_accepted, size, most) or not self._submit(size, requeued):
                return
            waiting = [each for each in waiting if each[1].rollouts[0].group_index not in each[0].settled]

    def _most_in_flight(self, n_accepted: int) -> int:
        record = self._base.record if self._base is not None else {"groups": (), "n_dropped": {}}
        n_before, n_dropped = len(record["groups"]), sum(record["n_dropped"].values())
        n_decided = n_accepted + n_before + n_dropped + sum(self._n_dropped.values())
        # prior: two decided groups, one of them accepted
        share = (n_accepted + n_before + 1) / (n_decided + 2)
        return self.options.most_wanted(max(1, self.options.train_batch_size - n_accepted), share)

    def _has_room(self, n_accepted: int, size: int, most_in_flight: int) -> bool:
        n_inflight = sum(wave.n_inflight for wave in self._waves)
        if not self.options.carries_over and n_accepted >= self.options.train_batch_size:
            return False
        if n_inflight + size > most_in_flight or self._is_exhausted:
            return False
        collects = self._due == self._step
        most = self.options.most_ahead(collects=collects)
        # a wave larger than the limit in advance runs when nothing else does
        return most is None or n_accepted + n_inflight + size <= most or (collects and n_inflight == 0)

    @property
    def _is_exhausted(self) -> bool:
        most = self.options.most_requested
        return most is not None and self._n_requested + self.options.wave_size > max(most, self.options.wave_size)

    def _submit(self, size: int, requeued: Sequence[RequeuedGroup]) -> bool:
        """Submit the next wave: of these instances, or of fresh ones. False if the farm takes no more now."""
        if requeued:
            instances, state = list(self._client.runs.instances([each.group_id for each in requeued])), self._state
            n_samples = self._request.n_samples - len(requeued[0].kept)
        else:
            instances, state = self._sampler.draw(size, self._state)
            for each in instances:
                check_own_key(each.instance_id, each.engine_key)
            n_samples = self._request.n_samples
        own = wave_metadata(self._step, self._next, state, requeued)
        values: dict[str, Any] = {"idempotency_key": wave_key(self._run, self._next), "run": self._run}
        values |= {"metadata": self._request.metadata | {METADATA: own}, "n_samples": n_samples}
        if (seed := self._request.sampling.seed) is not None:
            # else an instance that returns at the same index of a wave would get the same draws
            values["sampling"] = self._request.sampling.model_copy(update={"seed": step_seed(seed, self._next)})
        request = self._request.model_copy(update={"instances": tuple(instances), **values}).model_dump()
        try:
            batch_id = self._client.submit(request)
        except Conflict:
            # submitted by a predecessor or another trainer of this run, which drew other instances
            self._adopt()
            return True
        except Overloaded as error:
            log.warning("Run %s: %s", self._run, error)
            return False
        except InvalidRequest as error:
            raise InvalidRequest.of([of_instance(each, instances) for each in error.complaints]) from error
        self._add(Wave(self._next, self._step, batch_id, len(instances), tuple(requeued)), state)
        return True

    def _check_can_go_on(self, n_accepted: int) -> None:
        if self._is_exhausted and not any(wave.n_inflight for wave in self._waves):
            raise InvalidRequest(
                f"step {self._step} of run {self._run} requested {self._n_requested} instances and has {n_accepted} "
                f"of {self.options.train_batch_size} groups; dropped: {dict(self._n_dropped)}. Raise it, or add "
                "instances that are neither too easy nor too hard",
                field="max_num_gen_batches",
            )

    def _decide(self, step: int, chosen: Sequence[tuple[Wave, Group]]) -> CollectedStep:
        """Record the step, and cancel groups that must not continue."""
        first_fresh = self._base.record["next_wave"] if self._base is not None else 0
        n_carried = sum(wave.number < first_fresh for wave, _ in chosen)
        for wave, group in chosen:
            wave.settle(group.rollouts[0].group_index)
        # the next step finds them ended, and requeues their instances
        cut = [] if self.options.carries_over else [wave for wave in self._waves if wave.n_inflight]
        n_cancelled, cancelled = sum(wave.n_inflight for wave in cut), [wave.batch_id for wave in cut]
        self._waves = [wave for wave in self._waves if not wave.is_settled]
        groups = tuple(group for _, group in chosen)
        requested = Lengths.of_requested(groups)
        record = {
            "groups": [group.group_id for group in groups],
            "kept": {
                group.group_id: kept for wave, group in chosen if (kept := wave.kept(group.rollouts[0].group_index))
            },
            "n_dropped": dict(self._n_dropped),
            "n_cancelled": n_cancelled,
            "n_requeued": len(self._requeued),
            "n_carried": n_carried,
            "n_open": sum(wave.n_groups - len(wave.settled) for wave in self._waves) - n_cancelled,
            "trained": Lengths.of_trained(groups).record(),
            "requested": sum((each.lengths for each in self._requeued), requested).record(),
            "cancelled": cancelled,
            "open": [wave.record() for wave in self._waves],
            "next_wave": self._next,
            "sampler": self._state,
            "by": secrets.token_hex(8),
        }
        # until it is known who wrote the record, memory is not valid
        self._is_resumed = False
        recorded = self._client.runs.record_step(self._run, step, record)
        if recorded.record["by"] != record["by"]:
            return self._recorded(recorded)
        for batch_id in cancelled:
            self._client.cancel(batch_id)
        self._base, self._is_resumed = recorded, True
        self._n_requested, self._requeued, self._n_dropped = 0, [], Counter()
        self._due = step + 1
        return _collected(recorded, groups)

    def _recorded(self, step: RecordedStep) -> CollectedStep:
        for batch_id in step.record["cancelled"]:
            self._client.cancel(batch_id)
        return _collected(step, chosen_groups(self._client, step.record["groups"], step.record.get("kept", {})))


def _collected(step: RecordedStep, groups: tuple[Group, ...]) -> CollectedStep:
    record = step.record
    # records of earlier versions lack fields read with a default
    numbers = (record["n_dropped"], record["n_cancelled"], record.get("n_requeued", 0), record["n_carried"])
    lengths = (Lengths(*record.get("trained", ())), Lengths(*record.get("requested", ())))
    return CollectedStep(step.run, step.step, groups, *numbers, record["n_open"], *lengths)


def _chunks(keys: list[str], size: int = 1000) -> Iterator[list[str]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


class Producer:
    """Keeps a run's waves in flight until it is closed: `with Producer(collector):` around the training.

    A thread takes ended groups and requests more, so that `max_inflight_groups` are always in flight. It stops when the
    groups in flight and waiting suffice for the next `max_staleness` steps: more would become too old. Its errors are
    logged, and it retries; the trainer's own `collect` raises them. Raises InvalidRequest if the options leave nothing
    to carry over.
    """

    def __init__(self, collector: StepCollector, *, poll_s: float = 0.5) -> None:
        if not collector.options.carries_over:
            raise InvalidRequest(
                "must be 'carry_over': groups produced in advance would be cancelled", field="leftovers"
            )
        self._collector = collector
        self._poll_s = poll_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="farm-producer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Groups in flight continue, and are carried over."""
        self._closed.set()
        self._thread.join()

    def _produce(self) -> None:
        last_error = ""
        while not self._closed.is_set():
            try:
                self._collector.keep_ahead()
                last_error = ""
            except Exception as error:
                if str(error) != last_error:
                    # errors of a sampler or of the trainer's own rule are bugs
                    is_bug = not isinstance(error, FarmError)
                    log.warning("Production ahead of the trainer is paused: %s", error, exc_info=is_bug)
                last_error = str(error)
            self._closed.wait(self._poll_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
