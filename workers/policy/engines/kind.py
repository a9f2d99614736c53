"""The interface of a kind of LLM server, and the kinds that are installed.

A kind is a stateless class, registered by an entry point in the group `farm.engines`; the entry point's name is the
kind's name in `EngineInfo.kind`. It recognises its servers and knows the wires on which they accept token ids, and how
to pause them for new weights. All kinds share the chat route of the OpenAI API. The farm's own kinds are `vllm.py`,
`sglang.py`, `prorl.py` and `chat_only.py`; docs/concepts/engines.md shows how to write another.

The control of a server pauses it for new weights and names its weights, by its own endpoints, if it has any.

| mode | vLLM | SGLang |
|---|---|---|
| drain | `wait` | waits until nothing runs, then `in_place` |
| keep | `keep` | `retract`, so that the kept prefixes are recomputed under the new weights, as in vLLM |
| abort | `abort` | `abort` |

SGLang cannot drain and hold new calls back; the pool sends no calls while its engines are paused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, cast

from farm import plugins
from farm.errors import EngineError, NotFound
from farm.records.engine import EngineInfo, PauseMode
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal
from workers.policy.engines.wire import Wire
from workers.policy.generation import Control, EngineUnfit, Generation

NO_ROUTE = (401, 403, 404, 405)
"""The statuses by which a server shows that an endpoint is missing or disabled."""
log = logging.getLogger(__name__)
GROUP = "farm.engines"


class NoControl:
    """The control of a server that cannot be paused; the farm holds its own calls back instead."""

    def __init__(self, engine: str, advice: str = "") -> None:
        self._message = f"engine {engine} takes no pause or version itself; the farm holds calls back instead{advice}"

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError(self._message)

    async def resume(self) -> None:
        raise EngineError(self._message)

    async def set_version(self, version: str) -> None:
        raise EngineError(self._message)

    async def load_weights(self, path: str) -> None:
        raise EngineError(self._message)

    async def version(self) -> str:
        return ""

    async def paused(self) -> bool | None:
        return None


class HttpControl:
    """The base of a control by endpoints; its errors name the engine, and the option that would enable the endpoint."""

    advice: ClassVar[str]
    modes: ClassVar[Mapping[PauseMode, str]]
    """The server's names of the modes."""
    version_path: ClassVar[str]

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._engine = connection.url

    async def version(self) -> str:
        return str((await self._call("GET", self.version_path)).get("weight_version") or "")

    async def _call(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> dict[str, Any]:
        """Return the answer's JSON object. Raises EngineError also if the answer reports a failure."""
        try:
            answer = await (self._connection.get(path) if method == "GET" else self._connection.post(path, body))
        except Refusal as refusal:
            raise self._failure(path, refusal) from refusal
        except FAILURES as error:
            raise failures.broken(self._engine, error) from error
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise EngineError(f"engine {self._engine} did not carry out {path}: {str(answer)[:300]}; see its log")
        return answer

    def _failure(self, path: str, refusal: Refusal) -> Exception:
        if refusal.status in NO_ROUTE:
            return EngineError(f"engine {self._engine} has no {path} (status {refusal.status}); {self.advice}")
        return failures.refused(self._engine, refusal.status, refusal.headers, refusal.body)


@dataclass(frozen=True, slots=True)
class Identity:
    """A server's description of itself; empty fields are taken from the model's card.

    `root` is the source of its model, a folder or a name on a hub. `control`: it supports pause, resume and naming of
    weight versions. `notes` are remarks for the operator, such as a flag that would add a capability.
    """

    version: str = ""
    root: str = ""
    context_tokens: int | None = None
    control: bool = False
    notes: tuple[str, ...] = ()


class EngineKind(Protocol):
    """One kind of LLM server. Derived classes inherit the defaults."""

    health_paths: ClassVar[Sequence[str]] = ("/health",)
    """The routes of its health check; the first that exists is used."""
    is_fallback: ClassVar[bool] = False
    """True if it accepts unknown servers: it is tried last, and a failure on one of its wires only means that
    the server lacks the wire."""

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        """Return the identity of a server of this kind, None for other kinds; `card` is the model's list entry.

        May raise the connection's errors, and EngineError if the server is of this kind but unusable now.
        """
        ...

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        """Return the wires on which its servers may accept token ids, the best first."""
        ...

    def control(self, info: EngineInfo, connection: EngineConnection) -> Control:
        """Return the control of a server; by default there is none, and the farm holds its own calls back."""
        return NoControl(connection.url)

    def remarks(self, first: Generation) -> Iterable[str]:
        """Yield remarks for the operator on data missing from the first answer to token ids."""
        return ()


@cache
def _loaded(name: str) -> EngineKind:
    return cast(EngineKind, plugins.load(GROUP, name)())


def kind(name: str) -> EngineKind:
    """Return the kind of that name. Raises EngineUnfit if it is not installed here, or cannot be imported."""
    try:
        return _loaded(name)
    except NotFound as missing:
        raise EngineUnfit(str(missing)) from missing
    except Exception as error:
        raise EngineUnfit(f"the {GROUP} plug-in {name!r} cannot be used here: {error!r}") from error


def kinds() -> Iterator[tuple[str, EngineKind]]:
    """Yield all kinds by name, fallback kinds last; one that cannot be imported is skipped and logged."""
    by_name: dict[str, EngineKind] = {}
    for name in sorted(plugins.installed(GROUP)):
        try:
            by_name[name] = _loaded(name)
        except Exception:
            log.exception("The %s plug-in %r cannot be used", GROUP, name)
    yield from sorted(by_name.items(), key=lambda item: item[1].is_fallback)


def wire_of(info: EngineInfo) -> Wire | None:
    """Return the wire on which an engine accepts token ids; None if there is none. Raises EngineUnfit."""
    if not info.token_in:
        return None
    for wire in kind(info.kind).wires(info):
        if wire.name == info.token_in:
            return wire
    raise EngineUnfit(f"engines of kind {info.kind!r} have no wire {info.token_in!r} here; restart this node")


def takes_guides(info: EngineInfo) -> bool:
    """Return whether the used wire supports guided answers."""
    wire = wire_of(info)
    return wire is not None and wire.takes_guides
