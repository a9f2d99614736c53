"""Readiness of a farm: the reasons submitted rollouts would not be played, by its nodes and engines.

Rule: ready is what was seen to work. A node counts while its heartbeat is fresh; an engine once it has answered a node,
has the farm's weights and is neither paused nor out. All commands use it, so that no two of them differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from farm.records.engine_state import ACTIVE, EngineState, StoredEngine
from farm.records.node import BROKEN, DRAINING, PROBES, Node
from farm.settings import settings

_PAUSE_S = 300.0
"""A weight update takes less."""
NOT_ASKED = "has not answered any node yet"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. `mend` says what to do if it is not `ok`; `needed` whether a farm can do without."""

    what: str
    ok: bool
    detail: str
    mend: str = ""
    needed: bool = True


def unready_reason(node: Node) -> str:
    """Return the reason a node gets no rollouts, or fewer than it has room for; empty if it is healthy."""
    if node.heartbeat_age_s > settings().node_timeout_s:
        return f"has said nothing for {node.heartbeat_age_s:.0f} s"
    if node.state == BROKEN:
        return f"takes nothing: {node.info.get(BROKEN, 'its workers end as soon as they are started')}"
    if node.state == DRAINING:
        return "takes nothing more, as it is ending"
    if node.out_of_service_s > 0:
        until = datetime.now(UTC) + timedelta(seconds=node.out_of_service_s)
        return f"takes nothing until {until:%H:%M:%S} UTC: {node.out_of_service_why}"
    return f"is given {PROBES} rollouts at a time: {node.out_of_service_why}" if node.n_trips else ""


def takes_rollouts(node: Node) -> bool:
    """Tell whether a node is there and is not ending; one that is out for a while comes back by itself."""
    return node.state not in (BROKEN, DRAINING) and node.heartbeat_age_s <= settings().node_timeout_s


def engine_trouble(engine: StoredEngine) -> str:
    """Return why an engine gets no calls, or may get none; empty if it is known to work."""
    if engine.paused_s > _PAUSE_S and not engine.abandoned:
        return f"has been paused for {engine.paused_s:.0f} s by {engine.paused_by}"
    return engine.trouble or (NOT_ASKED if engine.info is None else "")


def missing_parts(nodes: Sequence[Node], engines: Sequence[EngineState], *, needs_engine: bool = True) -> list[str]:
    """Return what keeps all batches waiting, a line each; empty if nothing does.

    `needs_engine` is False for a batch that brings its own engines.
    """
    lines = []
    if not any(map(takes_rollouts, nodes)):
        last = min(nodes, key=lambda node: node.heartbeat_age_s, default=None)
        why = "" if last is None else f" ({last.node} {unready_reason(last)})"
        lines.append(f"no node runs{why}: nothing is played until `farm up` or `farm node` is started")
    if not needs_engine:
        return lines
    if not engines:
        lines.append("no engine is added: what asks a policy waits until `farm engines add http://HOST:PORT/v1`")
    elif all(_is_out(state.engine) for state in engines):
        first = engines[0].engine
        why = engine_trouble(first) or f"is {first.state}"
        lines.append(f"no engine can be used: {first.url} {why}; see `farm engines list`")
    return lines


def remarks(nodes: Sequence[Node], engines: Sequence[EngineState]) -> list[str]:
    """Return the troubles of the farm's nodes and engines for a person who watches a batch, a line each."""
    return [
        *missing_parts(nodes, engines),
        *(f"node {node.node} {why}" for node in nodes if (why := unready_reason(node))),
    ]


def _is_out(engine: StoredEngine) -> bool:
    """Return whether an engine will not be used soon; one that was only just added is probed in a moment."""
    return engine.state != ACTIVE or engine_trouble(engine) not in ("", NOT_ASKED)
