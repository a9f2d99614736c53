"""The wire formats of verifiers' env server, one per version of a client; this module does not need verifiers.

A client of any version sends frames `[request id, method, payload]`. The expected reply differs:

* `WHOLE`, of verifiers at a60a606, used by prime-rl 559b447: `[request id, payload]`. The reply of a run has the
  episode. A message with more frames makes the client stop reading for good.
* `STREAMED`, of verifiers 0.4.0: `[request id, kind, payload]`. An episode's traces come in messages of the kind
  `delta`, the rest of it in one of the kind `reply`. A message with other frames is skipped.

A run shows the version: its endpoint has fields in 0.4.0 that a60a606 lacks. Health, which a client asks for first,
does not, as its payload is empty. An unknown client is answered in two frames, which harms neither; one that asks
repeatedly has not understood them. Probes that were sent before the server started arrive all at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_TELLING = frozenset({"headers_from_env", "timeout"})
"""Fields of a run's endpoint in 0.4.0."""
_HEADER = ("version", "id", "verifiers", "task")
_LISTS = ("nodes", "calls", "errors", "extra_usage", "request_rewrites", "response_rewrites")
_N_PROBES = 2
"""Probes that are answered in two frames: the first may have been sent long ago, the second was not."""
_APART_S = 0.5
"""Probes that come closer together count as one."""
_N_CLIENTS = 10_000
"""Clients that are remembered; each connection is one."""
_OWN_ERROR = "error"
"""a60a606's stop condition of a failed trace; 0.4.0 names the kind of the error."""


class ClientWire(StrEnum):
    """A wire format, by the version of verifiers that uses it."""

    WHOLE = "a60a606"
    STREAMED = "0.4.0"

    def frames(self, kind: str, payload: bytes) -> list[bytes]:
        """Return the frames of a message after the request's id; `kind` is `reply` or `delta`."""
        return [payload] if self is ClientWire.WHOLE else [kind.encode(), payload]

    def messages(self, episode: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return the reply messages of a run as kinds and payloads; the episode is a dumped one."""
        traces = episode["traces"]
        if self is ClientWire.WHOLE:
            shown = [{**trace, **({"stop_condition": _OWN_ERROR} if trace["errors"] else {})} for trace in traces]
            return [("reply", reply(episode={**episode, "traces": shown}))]
        sizes = [{"id": each["id"], "nodes": len(each["nodes"]), "calls": len(each["calls"])} for each in traces]
        head = {name: value for name, value in episode.items() if name != "traces"}
        return [*(("delta", _delta(trace)) for trace in traces), ("reply", reply(head=head, traces=sizes))]


def reply(error: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return the payload of a reply; one with an error did not succeed."""
    return {"success": error is None, "error": error, **fields}


def _delta(trace: Mapping[str, Any]) -> dict[str, Any]:
    lists = {name: trace[name] for name in _LISTS if name in trace}
    known = {*_HEADER, *_LISTS}
    return {
        "trace": trace["id"],
        "open": {name: trace[name] for name in _HEADER if name in trace},
        **lists,
        "set": {name: value for name, value in trace.items() if name not in known},
    }


def plain_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's payload in the fields of both versions: headers and sampling parameters in one place each.

    Headers that a client names by variables are read from this server's environment. Timeouts of the endpoint are left
    out, as the farm has its own.
    """
    plain = dict(request)
    client, sampling = request.get("client"), request.get("sampling")
    if isinstance(client, Mapping):
        named = client.get("headers_from_env") or {}
        headers = {name: os.environ[variable] for name, variable in named.items() if variable in os.environ}
        kept = {name: value for name, value in client.items() if name not in _TELLING}
        plain["client"] = kept | ({"headers": {**client.get("headers", {}), **headers}} if headers else {})
    if isinstance(sampling, Mapping):
        own = {name: value for name, value in sampling.items() if name != "extra_body" and value is not None}
        plain["sampling"] = {**(sampling.get("extra_body") or {}), **own}
    return plain


@dataclass(slots=True)
class _Client:
    """A connection: the wire shown by its runs, or the number of its health probes."""

    shown: ClientWire | None = None
    n_probes: int = 0
    probed_at: float = 0.0


class ClientWires:
    """The wires of a server's clients, by the identities of their connections. Not thread-safe."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client] = {}

    def of(self, client: bytes) -> ClientWire:
        """Return the wire shown by a client's runs, or the one guessed from its probes."""
        known = self._clients.get(client, _Client())
        if known.shown is not None:
            return known.shown
        return ClientWire.WHOLE if known.n_probes <= _N_PROBES else ClientWire.STREAMED

    def of_run(self, client: bytes, request: Any) -> ClientWire:
        """Return the wire of a run by its payload, and remember it for its client; needs an endpoint in the payload."""
        endpoint = request.get("client") if isinstance(request, Mapping) else None
        if isinstance(endpoint, Mapping):
            self._known(client).shown = ClientWire.STREAMED if _TELLING & endpoint.keys() else ClientWire.WHOLE
        return self.of(client)

    def of_probe(self, client: bytes, at: float) -> ClientWire:
        """Return the wire for the answer to a health probe; `at` is in seconds of a monotonic clock."""
        known = self._known(client)
        if not known.n_probes or at - known.probed_at >= _APART_S:
            known.n_probes += 1
            known.probed_at = at
        return self.of(client)

    def _known(self, client: bytes) -> _Client:
        if client not in self._clients and len(self._clients) >= _N_CLIENTS:
            del self._clients[next(iter(self._clients))]
        return self._clients.setdefault(client, _Client())
