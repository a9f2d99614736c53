"""An LLM server as the farm knows it: settings, orders, its weights, and its load.

An engine gets calls only if the weights that it last reported are the farm's current ones. An engine that is new, was
out when the version was named, or came back with other weights lacks them until they are pushed to it and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from farm.records.engine import EngineInfo, PauseMode

ACTIVE = "active"
DRAINING = "draining"
Paused: TypeAlias = PauseMode | Literal[""]
STATUSES = ("ready", "draining", "unknown", "out", "without weights", "paused", "abandoned")
"""The values of `StoredEngine.status`."""
HOLD_S = 20.0
"""Seconds without a heartbeat after which a client that updates weights counts as disconnected."""
RUN_MODEL = "run:"
"""The prefix of the models of training runs: `run:NAME`."""


def is_reserved(model: str) -> bool:
    """Return whether an engine of this model belongs to a training run.

    It serves only batches that name this model. Its trainer updates its weights: orders to all engines skip it.
    """
    return model.startswith(RUN_MODEL)


def serves(engine_model: str, model: str) -> bool:
    """Return whether an engine of `engine_model` may serve a batch that asks for `model` (empty: any)."""
    if is_reserved(engine_model) or is_reserved(model):
        return engine_model == model
    return not model or engine_model in ("", model)


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """An LLM server. `url` ends in /v1; an empty `model` is the first that it lists.

    `info` is None until a node has probed its capabilities. `failure` says why it is out, empty if it is not. `paused`
    and `version` are what was ordered: `n_orders` counts orders, `version_order` is the number of the order that named
    the version, `n_done` that of the last completed one; `engine_paused` and `engine_version` are the last values sent.
    `paused_s` is the time since it was ordered to pause, `silent_s` the time since the last heartbeat of the client
    that did so for a weight update. `weights_path` is where servers can load the weights `version`, empty if unknown.
    """

    url: str
    model: str = ""
    key: str = field(default="none", repr=False)
    added_by: str = ""
    """The node that was started with it and removes it when it ends; empty if it was also added otherwise."""
    tokenizer: str = ""
    tool_format: str = ""
    state: str = ACTIVE
    info: EngineInfo | None = None
    paused: Paused = ""
    paused_by: str = ""
    paused_s: float = field(default=0.0, compare=False)
    version: str = ""
    version_order: int = 0
    n_orders: int = 0
    n_done: int = 0
    engine_paused: Paused = ""
    engine_version: str = ""
    failure: str = ""
    weights_path: str = ""
    silent_s: float = field(default=0.0, compare=False)

    @property
    def to_name(self) -> bool:
        """True if its weights are not yet named. An engine that was out during that order does not have them."""
        return self.version_order > self.n_done and self.version != self.engine_version

    @property
    def lacks_weights(self) -> bool:
        """True if it gets no calls because it lacks the farm's current weights."""
        return self.version != self.engine_version and not self.to_name

    @property
    def abandoned(self) -> bool:
        """True if the client that paused it for new weights disconnected without resuming it."""
        return bool(self.paused) and self.silent_s > HOLD_S

    @property
    def status(self) -> str:
        """`ready`, `draining`, or why it gets no calls: `unknown`, `out`, `without weights`, `paused`, `abandoned`."""
        if self.paused:
            return "abandoned" if self.abandoned else "paused"
        if self.failure:
            return "out"
        if self.info is None:
            return "unknown"
        if self.lacks_weights:
            return "without weights"
        return "draining" if self.state == DRAINING else "ready"

    @property
    def trouble(self) -> str:
        """The reason it gets no calls without intervention, and the remedy; empty if no intervention is needed."""
        if self.abandoned:
            return (
                f"paused for new weights by {self.paused_by}, which has been silent for {self.silent_s:.0f} s; "
                "they may be half written: push them again with a weight update, or run `farm engines resume`"
            )
        if self.failure:
            return self.failure
        if not self.lacks_weights or self.paused:
            return ""
        has = f"it has {self.engine_version!r}" if self.engine_version else "it reports no version"
        return (
            f"lacks version {self.version} of the weights ({has}) and gets no calls; push them and name them with "
            f"set_version, or let the farm do it with weight_update(..., path=...) or serve_weights"
        )


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The calls of a process in flight on an engine, and the last order that the process follows."""

    n_orders: int
    n_calls: int = 0
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine and all workers' calls in flight there, from reports that are at most a few seconds old."""

    engine: StoredEngine
    n_calls: int
    n_tokens: int


def troubles(engines: Sequence[StoredEngine], model: str) -> tuple[str, ...]:
    """Return why no engine serves batches of this model without intervention; empty while one of them is usable."""
    serving = [engine for engine in engines if serves(engine.model, model)]
    if any(engine.status in ("ready", "draining", "paused") for engine in serving):
        return ()
    if is_reserved(model) and not serving:
        return (without_engine(model),)
    return tuple(f"engine {engine.url} {engine.trouble}" for engine in serving if engine.trouble)


def without_engine(model: str) -> str:
    """Return why a batch of this model does not run if no engine serves it."""
    if is_reserved(model):
        run = model.removeprefix(RUN_MODEL)
        return f"the training run {run} has no engine: its trainer registers them while it runs; restart the trainer"
    return f"no engine serves {model or 'any model'}: `farm engines add` one"
