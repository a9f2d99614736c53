"""The collector of a training run: asks for fresh instances until a step has its groups, and records what they are."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from farm.client.farm import Farm
from farm.client.request_checks import checked_request
from farm.collecting.group_decisions import AcceptGroup, GroupDecision, decide, too_old
from farm.collecting.instance_samplers import InstanceSampler, SamplerState
from farm.collecting.options import CollectingOptions
from farm.collecting.waves import METADATA, CollectedStep, Wave, chosen_groups, wave_key, wave_metadata
from farm.errors import Conflict, InvalidRequest, Overloaded, StoreWentBack
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Group
from farm.records.training_run import RecordedStep, check_run
from farm.seeds import step_seed

log = logging.getLogger(__name__)

_POLL_S = 0.2
_LOOK_AHEAD = 32
"""Waves that are looked up at a time where a predecessor may have submitted some."""
_OWN = ("instances", "idempotency_key", "run")
_PLACE = re.compile(r"^instances\[(\d+)\]")


class StepCollector:
    """Collects the steps of a run, one after the other; the package says how.

    `request` are the other fields of `farm.BatchRequest`: `n_samples`, `sampling`, `limits`, `model` … `accept` is a
    rule of the trainer's own for groups. `wait` is called between two looks at the store.

    Weights of a step are named to the farm (`weight_update`) before it is collected. Safe to use from several threads,
    of which one collects at a time. Raises InvalidRequest that names the option.
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
        self._request = _checked_fields(request, options)
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
        self._n_fresh = 0
        self._n_dropped: Counter[str] = Counter()

    def collect(self, step: int, timeout_s: float | None = None) -> CollectedStep:
        """Return the groups of a step: those that it was given before, or the first that are accepted now.

        Raises InvalidRequest when it asked for `max_num_gen_batches` and found too few, or for a step before one that
        is collected; TimeoutError when the groups are not there after `timeout_s`. Nothing is lost by either: what was
        played counts when the step is collected again.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidRequest(f"a whole number, 0 or more, is wanted, not {step!r}", field="step")
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
                accepted = self._look(step)
                if len(accepted) >= self.options.train_batch_size:
                    return self._decide(step, accepted[: self.options.train_batch_size])
                self._ask(len(accepted))
                self._check_can_go_on(len(accepted))
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"step {step} of run {self._run}: {len(accepted)} of {self.options.train_batch_size} groups "
                    f"after {timeout_s:g} s; dropped: {dict(self._n_dropped)}"
                )
            self._wait(_POLL_S)

    def keep_ahead(self) -> None:
        """Ask for what the step after the last can still train in time: what a `Producer` does now and then."""
        with self._lock:
            if not self._is_resumed:
                base = self._client.runs.recorded_step(self._run)
                if base is None:
                    # the trainer says with which step the run begins
                    return
                self._resume(base)
            self._ask(len(self._look(self._due)))

    def _check_is_next(self, step: int) -> None:
        newest = self._client.runs.recorded_step(self._run)
        if newest is not None and newest.step > step:
            raise InvalidRequest(
                f"run {self._run} has collected step {newest.step}, and nothing is recorded for {step}: steps go up; "
                "a new name begins a new run",
                field="step",
            )

    def _resume(self, base: RecordedStep | None) -> None:
        """Go on from a step's record, and from the waves that were submitted after it; or from memory if that is it."""
        if self._is_resumed and (self._base and self._base.step) == (base and base.step):
            return
        record = base.record if base is not None else {}
        for batch_id in record.get("cancelled", ()):
            # whoever recorded it may have been killed before it did so
            self._client.cancel(batch_id)
        self._base = base
        if base is not None:
            self._step, self._due = base.step, base.step + 1
        self._state, self._next = record.get("sampler", {}), record.get("next_wave", 0)
        self._waves = [Wave.from_record(values) for values in record.get("open", ())]
        self._n_fresh, self._n_dropped = 0, Counter()
        self._adopt()
        self._is_resumed = True

    def _adopt(self) -> None:
        """Take over the waves that were submitted, by a predecessor or another, after those that are known."""
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
        self._n_fresh += wave.n_groups

    def _look(self, step: int) -> list[tuple[Wave, Group]]:
        """Take what has ended, drop what is not accepted, and return the accepted groups, of the oldest wave first."""
        by_key = {wave_key(self._run, wave.number): wave for wave in self._waves}
        for some in _chunks(list(by_key)):
            known = {batch.key: batch for batch in self._client.runs.keyed_batches(some)}
            for key in some:
                if key not in known:
                    raise StoreWentBack(
                        f"batch {by_key[key].batch_id} of run {self._run} was there, and is not known any more: the "
                        "database went back in time; go on from an older step"
                    )
                if (enough := self.options.early_stop_samples) is not None:
                    by_key[key].cut(self._client, known[key].cursor, enough)
                by_key[key].poll(self._client, known[key].cursor)
        if not any(wave.whole for wave in self._waves):
            return []
        newest = self._client.newest_version() if self.options.max_staleness is not None else ""
        accepted = []
        for wave in self._waves:
            for index, group in list(wave.whole.items()):
                decision = wave.decisions.get(index) or self._decision(group)
                wave.decisions[index] = decision
                if decision is GroupDecision.ACCEPTED and too_old(
                    group, newest, step - wave.step, self.options.max_staleness
                ):
                    decision = GroupDecision.STALE
                if decision is GroupDecision.ACCEPTED:
                    accepted.append((wave, group))
                else:
                    self._n_dropped[decision.value] += 1
                    wave.settle(index)
        self._waves = [wave for wave in self._waves if not wave.is_settled]
        return accepted

    def _decision(self, group: Group) -> GroupDecision:
        return decide(group, self._least, filtered=self.options.filter_groups == "drop", accept=self._accept)

    def _ask(self, n_accepted: int) -> None:
        """Submit waves as long as there is room for them."""
        while self._has_room(n_accepted):
            if not self._submit():
                return

    def _has_room(self, n_accepted: int) -> bool:
        options, size = self.options, self.options.wave_size
        n_inflight = sum(wave.n_inflight for wave in self._waves)
        if options.leftovers == "cancel" and n_accepted >= options.train_batch_size:
            return False
        if n_inflight + size > options.most_in_flight or self._is_exhausted:
            return False
        collects = self._due == self._step
        most = options.most_ahead(collects=collects)
        # a wave that is larger than what is allowed ahead is played when nothing else is
        return most is None or n_accepted + n_inflight + size <= most or (collects and n_inflight == 0)

    @property
    def _is_exhausted(self) -> bool:
        most = self.options.most_fresh
        return most is not None and self._n_fresh + self.options.wave_size > max(most, self.options.wave_size)

    def _submit(self) -> bool:
        """Submit the next wave. False if the farm takes no more now."""
        instances, state = self._sampler.draw(self.options.wave_size, self._state)
        metadata = self._request.metadata | {METADATA: wave_metadata(self._step, self._next, state)}
        values: dict[str, Any] = {"idempotency_key": wave_key(self._run, self._next), "run": self._run}
        values |= {"metadata": metadata}
        if (seed := self._request.sampling.seed) is not None:
            # else an instance that comes again at the same place of a wave would be drawn alike
            values["sampling"] = self._request.sampling.model_copy(update={"seed": step_seed(seed, self._next)})
        request = self._request.model_copy(update={"instances": tuple(instances), **values}).model_dump()
        try:
            batch_id = self._client.submit(request)
        except Conflict:
            # a predecessor's, or that of another trainer of this run, which drew otherwise
            self._adopt()
            return True
        except Overloaded as error:
            log.warning("run %s: %s", self._run, error)
            return False
        except InvalidRequest as error:
            raise InvalidRequest.of([_of_instance(each, instances) for each in error.complaints]) from error
        self._add(Wave(self._next, self._step, batch_id, len(instances)), state)
        return True

    def _check_can_go_on(self, n_accepted: int) -> None:
        if self._is_exhausted and not any(wave.n_inflight for wave in self._waves):
            raise InvalidRequest(
                f"step {self._step} of run {self._run} asked for {self._n_fresh} fresh instances and has {n_accepted} "
                f"of {self.options.train_batch_size} groups; dropped: {dict(self._n_dropped)}. Raise it, or bring "
                "instances that are neither too easy nor too hard",
                field="max_num_gen_batches",
            )

    def _decide(self, step: int, chosen: list[tuple[Wave, Group]]) -> CollectedStep:
        """Write down what the step is, and cancel what is not to go on."""
        first_fresh = self._base.record["next_wave"] if self._base is not None else 0
        n_carried = sum(wave.number < first_fresh for wave, _ in chosen)
        for wave, group in chosen:
            wave.settle(group.rollouts[0].group_index)
        n_cancelled, cancelled = 0, []
        for wave in self._waves if self.options.leftovers == "cancel" else ():
            if unfinished := wave.unfinished:
                n_cancelled += len(unfinished)
                cancelled.append(wave.batch_id)
                wave.settled.update(unfinished)
        self._waves = [wave for wave in self._waves if not wave.is_settled]
        record = {
            "groups": [group.group_id for _, group in chosen],
            "n_dropped": dict(self._n_dropped),
            "n_cancelled": n_cancelled,
            "n_carried": n_carried,
            "n_open": sum(wave.n_groups - len(wave.settled) for wave in self._waves),
            "cancelled": cancelled,
            "open": [wave.record() for wave in self._waves],
            "next_wave": self._next,
            "sampler": self._state,
            "by": secrets.token_hex(8),
        }
        # from here on until it is known who wrote it, memory is not to be gone on from
        self._is_resumed = False
        recorded = self._client.runs.record_step(self._run, step, record)
        if recorded.record["by"] != record["by"]:
            return self._recorded(recorded)
        for batch_id in cancelled:
            self._client.cancel(batch_id)
        self._base, self._n_fresh, self._n_dropped, self._is_resumed = recorded, 0, Counter(), True
        self._due = step + 1
        return _collected(recorded, tuple(group for _, group in chosen))

    def _recorded(self, step: RecordedStep) -> CollectedStep:
        for batch_id in step.record["cancelled"]:
            self._client.cancel(batch_id)
        return _collected(step, chosen_groups(self._client, step.record["groups"]))


def _collected(step: RecordedStep, groups: tuple[Group, ...]) -> CollectedStep:
    record = step.record
    numbers = (record["n_dropped"], record["n_cancelled"], record["n_carried"], record["n_open"])
    return CollectedStep(step.run, step.step, groups, *numbers)


def _checked_fields(request: Mapping[str, Any], options: CollectingOptions) -> BatchRequest:
    """Return the request of a wave, with one instance in place of its own. Raises InvalidRequest naming the field."""
    fields = dict(request)
    for name in _OWN:
        if name in fields:
            raise InvalidRequest("the collector sets it", field=f"request.{name}")
    if METADATA in fields.get("metadata", {}):
        raise InvalidRequest("the collector sets it", field=f"request.metadata.{METADATA}")
    if fields.setdefault("max_staleness", options.max_staleness) != options.max_staleness:
        raise InvalidRequest(
            f"{fields['max_staleness']}, and the options have max_staleness={options.max_staleness}",
            field="request.max_staleness",
        )
    return checked_request({**fields, "instances": [{"data_source": "any", "fields": {}}]})


def _of_instance(complaint: tuple[str, str], instances: list[Instance]) -> tuple[str, str]:
    """Return a complaint about a wave with the name of the instance in place of its number in the wave."""

    def name(found: re.Match[str]) -> str:
        instance = instances[int(found[1])]
        return f"instance {instance.instance_id!r} of {instance.data_source}"

    field, message = complaint
    return _PLACE.sub(name, field), message


def _chunks(keys: list[str], size: int = 1000) -> Iterator[list[str]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
