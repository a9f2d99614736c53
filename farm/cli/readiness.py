"""Readiness of a farm: the reasons why submitted rollouts would not run, from its nodes and engines.

Rule: ready means seen to work. A node counts while its heartbeat is fresh; an engine once it has answered a node, has
the farm's weights and is neither paused nor out. All commands use this module, so that they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from farm.records.engine_state import ACTIVE, EngineState, StoredEngine
from farm.records.node import BROKEN, DRAINING, PROBES, Node
from farm.settings import settings

_PAUSE_S = 300.0
"""Longer than any weight update takes."""
NOT_PROBED = "has not answered any node yet"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. `remedy` says how to fix it if it is not `ok`; `needed`: a farm cannot run without it."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


def unready_reason(node: Node) -> str:
    """Return why a node gets no rollouts, or fewer than it has room for; empty if it is healthy."""
    if node.heartbeat_age_s > settings().node_timeout_s:
        return f"sent no heartbeat for {node.heartbeat_age_s:.0f} s"
    if node.state == BROKEN:
        return f"gets no rollouts: {node.info.get(BROKEN, 'its workers exit right after their start')}"
    if node.state == DRAINING:
        return "gets no more rollouts: it is draining"
    if node.out_of_service_s > 0:
        until = datetime.now(UTC) + timedelta(seconds=node.out_of_service_s)
        return f"is out of service until {until:%H:%M:%S} UTC: {node.out_of_service_why}"
    return f"gets {PROBES} rollouts at a time: {node.out_of_service_why}" if node.n_trips else ""


def takes_rollouts(node: Node) -> bool:
    """Return whether a node is up and not draining; one that is out of service for a while counts."""
    return node.state not in (BROKEN, DRAINING) and node.heartbeat_age_s <= settings().node_timeout_s


def engine_trouble(engine: StoredEngine) -> str:
    """Return why an engine gets no calls, or may get none; empty if it is known to work."""
    if engine.paused_s > _PAUSE_S and not engine.abandoned:
        return f"has been paused for {engine.paused_s:.0f} s by {engine.paused_by}"
    return engine.trouble or (NOT_PROBED if engine.info is None else "")


def missing_parts(nodes: Sequence[Node], engines: Sequence[EngineState], *, needs_engine: bool = True) -> list[str]:
    """Return the reasons why all batches wait, a line each; empty without any.

    `needs_engine` is False for a batch with dedicated engines.
    """
    lines = []
    if not any(map(takes_rollouts, nodes)):
        last = min(nodes, key=lambda node: node.heartbeat_age_s, default=None)
        reason = "" if last is None else f" ({last.node} {unready_reason(last)})"
        lines.append(f"no node runs{reason}: nothing runs until `farm up` or `farm node` is started")
    if not needs_engine:
        return lines
    if not engines:
        lines.append("no engine is added: rollouts with model calls wait until `farm engines add http://HOST:PORT/v1`")
    elif all(_is_out(state.engine) for state in engines):
        first = engines[0].engine
        reason = engine_trouble(first) or f"is {first.state}"
        lines.append(f"no engine can be used: {first.url} {reason}; see `farm engines list`")
    return lines


def remarks(nodes: Sequence[Node], engines: Sequence[EngineState]) -> list[str]:
    """Return the troubles of the farm's nodes and engines for a person who watches a batch, a line each."""
    return [
        *missing_parts(nodes, engines),
        *(f"node {node.node} {reason}" for node in nodes if (reason := unready_reason(node))),
    ]


def _is_out(engine: StoredEngine) -> bool:
    """Return whether an engine will not be used soon; one that was only just added is probed in a moment."""
    return engine.state != ACTIVE or engine_trouble(engine) not in ("", NOT_PROBED)
