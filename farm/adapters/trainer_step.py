"""A trainer's step on the farm: its list of samples → one batch → their rollouts, in the order of the list.

The batch of a step has an idempotency key made of the run's name, the step and its contents. So a restarted trainer
submits the same batch, and rollouts that had ended do not run again. Its options are checked before any training: one
clear error names the rollout and the option.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import httpx2
from pydantic import ValidationError

from farm.client.farm import Farm
from farm.client.request_checks import invalid
from farm.configuration.service_urls import normal_url
from farm.errors import FarmError, InvalidRequest, NotFound
from farm.records.engine import PauseMode
from farm.records.engine_state import ACTIVE, RUN_MODEL, EngineState, StoredEngine, serves
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Group, Rollout
from farm.records.trajectory import Segment
from farm.seeds import step_seed

Phase: TypeAlias = Literal["train", "eval"]
COLUMN = "farm_instance"
"""The data set column with an instance: `data_source`, `fields` and `instance_id`, as an object or JSON."""
MAX_NAME = 100
_COUNTED_STEPS = 64
_ROUTER_S = 30.0


def check_engines(states: Sequence[EngineState], model: str = "") -> None:
    """Raise InvalidRequest if a rollout could use an engine without token ids, or engines with different tokenizers.

    Engines that are not probed yet or get no new rollouts are not checked.
    """
    probed = [(each.engine, each.engine.info) for each in states if each.engine.state == ACTIVE]
    taking = [
        (engine, info)
        for engine, info in probed
        if info is not None and serves(engine.model, model) and model in ("", engine.model, info.model)
    ]
    for engine, info in taking:
        if not info.token_out:
            notes = f" ({'; '.join(info.notes)})" if info.notes else ""
            raise InvalidRequest(
                f"the engine {engine.url} returns no token ids with log-probabilities{notes}, so its rollouts "
                "cannot train: remove it, or choose others by `model`",
                field="model",
            )
    tokenizers = {engine.tokenizer or info.model: engine.url for engine, info in taking}
    if len(tokenizers) > 1:
        named = ", ".join(f"{name} at {url}" for name, url in sorted(tokenizers.items()))
        raise InvalidRequest(f"one batch would use engines with several tokenizers: {named}", field="model")


def check_has_ids(rollouts: Iterable[Rollout]) -> None:
    """Raise InvalidRequest for a scored rollout whose engine returned no token ids: it has text, and no row."""
    for rollout in rollouts:
        if rollout.trainable and rollout.n_response_tokens and not rollout.segments:
            raise InvalidRequest(
                f"rollout {rollout.rollout_id} was scored, but has no training row: its engine gave no token ids with "
                "log-probabilities; choose engines that do by `model`",
                field="model",
            )


def check_count(n_rollouts: int, n_samples: int) -> None:
    """Raise InvalidRequest unless there are as many rollouts as the trainer listed samples."""
    if n_rollouts != n_samples:
        raise InvalidRequest(f"the trainer listed {n_samples} samples, but there are {n_rollouts} rollouts", field="n")


def check_vocabulary(rollout_id: str, segment: Segment, vocabulary: int | None) -> None:
    """Raise InvalidRequest if a token id is beyond the trainer's vocabulary, i.e. from another tokenizer."""
    if vocabulary is None:
        return
    highest = max(
        (int(ids.max()) for ids in (segment.prompt_ids, segment.response_ids) if len(ids)),
        default=0,
    )
    if highest >= vocabulary:
        raise InvalidRequest(
            f"rollout {rollout_id} has the token id {highest}, but the trainer's vocabulary has {vocabulary}: its "
            "engine has another tokenizer",
            field="vocabulary",
        )


def too_long(rollout_id: str, noun: str, n_tokens: int, most: int, option: str) -> InvalidRequest:
    """Return the error for a prompt or response that is longer than the trainer's arrays."""
    return InvalidRequest(
        f"rollout {rollout_id} has a {noun} of {n_tokens} tokens, and {option} is {most}: raise it, lower the limits "
        "of the rollouts, or choose by `too_long` to cut or to mask such rows",
        field=option,
    )


def instance_of(row: Mapping[str, Any], column: str = COLUMN) -> Instance:
    """Return the instance in a row of a data set. Raises InvalidRequest naming the column or its field."""
    value = row.get(column)
    if value is None:
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise InvalidRequest(f"a row of the data set has no column {column!r}; it has: {columns}", field=column)
    try:
        value = json.loads(value) if isinstance(value, str | bytes) else value
        return value if isinstance(value, Instance) else Instance.model_validate(value)
    except ValidationError as error:
        raise invalid(error, column) from None
    except ValueError as error:
        raise InvalidRequest(f"it is not JSON: {error}", field=column) from None


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of a step, one instance for each, as instances that run `n_samples` times.

    Trainers repeat a problem for each of its samples, and may draw one problem twice: then it is two instances, with a
    group each. `positions[i]` is the group and the sample of the i-th in the list.
    """

    instances: tuple[Instance, ...]
    n_samples: int
    positions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, listed: Sequence[Instance]) -> Self:
        """Group equal instances. Raises InvalidRequest if there is none."""
        if not listed:
            raise InvalidRequest("a step has no samples", field="instances")
        keys = _keys(listed)
        n_samples = math.gcd(*Counter(keys).values())
        instances: list[Instance] = []
        positions: list[tuple[int, int]] = []
        filling: dict[str, tuple[int, int]] = {}
        for instance, key in zip(listed, keys, strict=True):
            group, sample = filling.get(key, (0, n_samples))
            if sample == n_samples:
                group, sample = len(instances), 0
                instances.append(instance)
            positions.append((group, sample))
            filling[key] = (group, sample + 1)
        return cls(tuple(instances), n_samples, tuple(positions))

    def in_order(self, groups: Sequence[Group]) -> list[Rollout]:
        """Return the rollouts of these groups in the order of the original list."""
        return [groups[group].rollouts[sample] for group, sample in self.positions]


def _keys(listed: Sequence[Instance]) -> list[str]:
    """Return a text for each instance, equal for equal instances; the same object is serialized only once."""
    written: dict[int, str] = {}
    for instance in listed:
        if id(instance) not in written:
            written[id(instance)] = instance.model_dump_json()
    return [written[id(instance)] for instance in listed]


def run_step(
    client: Farm,
    request: BatchRequest,
    *,
    run: str,
    step: int,
    phase: Phase = "train",
    part: int = 0,
    repeat: int = 0,
    timeout_s: float | None = None,
) -> list[Group]:
    """Run a batch, once however often it is submitted, and return its groups in the order of its instances.

    The key is made of the run, phase, step and the request; `part` distinguishes processes that each run some of a
    step, and `repeat` repetitions of a request within a step. Raises the errors of `submit` and `collect`.
    """
    keyed = request.model_copy(update={"idempotency_key": _key(request, run, step, phase, part, repeat)})
    return groups_of(client.collect(client.submit(keyed), timeout_s), request.n_samples)


def groups_of(rollouts: Sequence[Rollout], n_samples: int) -> list[Group]:
    """Return the groups of a whole batch as returned by `collect`."""
    members = (tuple(rollouts[start : start + n_samples]) for start in range(0, len(rollouts), n_samples))
    return [Group(rollouts[0].group_id, rollouts) for rollouts in members]


def _key(request: BatchRequest, run: str, step: int, phase: Phase, part: int, repeat: int) -> str:
    if not 0 < len(run) <= MAX_NAME:
        raise InvalidRequest(f"the name of a run must have 1 to {MAX_NAME} characters", field="run")
    content = request.model_dump_json(exclude={"idempotency_key", "metadata"})
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return f"{run}/{phase}/{step}/{part}/{digest}/{repeat}"


@dataclass(frozen=True, slots=True)
class TrainerServer:
    """An LLM server of a trainer. `url` ends in /v1, and is reachable from the farm's nodes."""

    url: str
    key: str = field(default="none", repr=False)
    tokenizer: str = ""


@dataclass
class TrainerRun:
    """A named training run on a farm. Safe to use from several threads.

    `settings` are the fields of `BatchRequest` for all its batches: `sampling`, `limits`, `model` and so on.
    `takes_experts` is False for a trainer whose rows have no field for routed experts.
    """

    client: Farm
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    part: int = 0
    servers_of: str = ""
    """The run for which the trainer's own servers are registered, if several runs of a trainer share them."""
    takes_experts: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _n_requests: dict[int, Counter[str]] = field(default_factory=dict, init=False, repr=False)
    _servers: dict[str, TrainerServer] = field(default_factory=dict, init=False, repr=False)
    """The servers of the trainer registered by this process, by URL."""

    def __post_init__(self) -> None:
        if own := [name for name in ("instances", "n_samples", "idempotency_key") if name in self.settings]:
            raise InvalidRequest("the trainer's step sets it: leave it out of the settings", field=own[0])

    @property
    def model(self) -> str:
        """The model under which the trainer's own servers are registered; they get no other batches."""
        return f"{RUN_MODEL}{self.servers_of or self.name}"

    @property
    def names_engines(self) -> bool:
        """True if the settings choose engines, so that the trainer's own are not used."""
        return bool(self.settings.keys() & {"model", "engine_url"}) and self.settings.get("model") != self.model

    def use_servers(self, servers: Sequence[TrainerServer]) -> None:
        """Register the trainer's own servers and use them from now on; its earlier ones are removed.

        Rollouts submitted by an earlier trainer of this run continue on these. Raises Forbidden if the client's key may
        not add engines.
        """
        by_url = {normal_url(server.url): server for server in servers}
        with self._lock:
            listed = {state.engine.url: state.engine for state in self.client.engines()}
            for url, engine in listed.items():
                if engine.model == self.model and url not in by_url:
                    self._remove(url)
            for url, server in by_url.items():
                is_listed = url in listed and listed[url].model == self.model
                # the address may have been another bridge's, with another key
                if not is_listed or (server.key != "none" and self._servers.get(url) != server):
                    self.client.add_engine(url, self.model, server.key, server.tokenizer)
            self._servers = by_url
            self.settings = {**self.settings, "model": self.model}

    def remove_servers(self) -> None:
        """Remove the servers registered by `use_servers`: the trainer ends."""
        with self._lock:
            for url in self._servers:
                self._remove(url)
            self._servers = {}

    def _remove(self, url: str) -> None:
        with contextlib.suppress(NotFound):
            self.client.remove_engine(url)

    def run_samples(
        self, listed: Sequence[Instance], step: int, phase: Phase = "train", **changed: Any
    ) -> list[Rollout]:
        """Run a sample for each of these instances; return the rollouts in order. Arguments as in `submit`."""
        batch_id, samples = self.submit(listed, step, phase, **changed)
        return samples.in_order(groups_of(self.client.collect(batch_id, self.timeout_s), samples.n_samples))

    def submit(
        self, listed: Sequence[Instance], step: int, phase: Phase = "train", **changed: Any
    ) -> tuple[str, StepSamples]:
        """Submit a sample for each of these instances; return the batch's id, and the positions of its rollouts.

        `changed` are fields of the request that override the run's settings. Raises InvalidRequest, before anything
        runs, if an engine returns no token ids or engines have several tokenizers.
        """
        samples = StepSamples.of(listed)
        request = self._request(samples, changed)
        if request.sampling.routed_experts is not None and not self.takes_experts:
            raise InvalidRequest("the trainer has no field for them: leave it out", field="sampling.routed_experts")
        if request.agent_requests.images == "engine":
            message = "the trainer's rows have no place for images: choose `text` or `refuse`"
            raise InvalidRequest(message, field="agent_requests.images")
        if phase == "train" and (seed := request.sampling.seed) is not None:
            # a problem that comes again in a later epoch gets new draws; an evaluation repeats the same ones
            sampling = request.sampling.model_copy(update={"seed": step_seed(seed, step)})
            request = request.model_copy(update={"sampling": sampling})
        if not _routed(request):
            check_engines(self.client.engines(), request.model)
        repeat = self._repeat(step, _key(request, self.name, step, phase, self.part, 0))
        key = _key(request, self.name, step, phase, self.part, repeat)
        return self.client.submit(request.model_copy(update={"idempotency_key": key})), samples

    def _request(self, samples: StepSamples, changed: Mapping[str, Any]) -> BatchRequest:
        fields = {**self.settings, **changed, "instances": samples.instances, "n_samples": samples.n_samples}
        try:
            return BatchRequest(**fields)
        except ValidationError as error:
            raise invalid(error) from None

    def _repeat(self, step: int, key: str) -> int:
        """Count the batches with this key in the step: a data set with one problem requests it again and again.

        Steps may overlap, if a trainer runs the next one while it trains; older ones are forgotten.
        """
        with self._lock:
            counts = self._n_requests.setdefault(step, Counter())
            for old in [each for each in self._n_requests if each < step - _COUNTED_STEPS]:
                del self._n_requests[old]
            counts[key] += 1
            return counts[key] - 1


def router_servers(host: str, port: int, tokenizer: str) -> list[TrainerServer]:
    """Return the SGLang servers of a router; the router itself if it splits prefill from decoding.

    Raises FarmError if it does not answer, or has none.
    """
    router = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        answer = httpx2.get(f"{router}/workers", timeout=_ROUTER_S, trust_env=False)
        workers = [(str(each["url"]), each.get("worker_type")) for each in answer.raise_for_status().json()["workers"]]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise FarmError(f"the router {router} does not list its servers: {error!r}") from error
    if not workers:
        raise FarmError(f"the router {router} has no servers: wait until the trainer's engines have started")
    is_split = any(kind in ("prefill", "decode") for _, kind in workers)
    urls = [router] if is_split else [url for url, _ in workers]
    return [TrainerServer(f"{url.rstrip('/')}/v1", tokenizer=str(tokenizer)) for url in urls]


def remove_silent_servers(client: Farm, runs: str) -> None:
    """Remove unused servers of trainers that are gone, of runs whose names have this prefix."""
    for engine in [state.engine for state in client.engines()]:
        if engine.model.startswith(f"{RUN_MODEL}{runs}") and engine.failure:
            with contextlib.suppress(NotFound):
                client.remove_engine(engine.url)


def _routed(request: BatchRequest) -> bool:
    """Return whether a request has a dedicated engine, and so uses none of the farm's."""
    return any(each.engine_url for each in (request, *request.instances))


@dataclass
class WeightPush:
    """Pushes weights to the farm's engines when the trainer's step has advanced, with the step as their version.

    `push(engines)` transfers them; see `Farm.weight_update`.
    """

    client: Farm
    push: Callable[[Sequence[StoredEngine]], object]
    mode: PauseMode = "drain"
    _step: int | None = field(default=None, init=False, repr=False)

    def at(self, step: int) -> bool:
        """Push the weights of this step unless done already. Returns whether it pushed."""
        if step == self._step:
            return False
        with self.client.weight_update(step, self.mode) as engines:
            self.push(engines)
        self._step = step
        return True
