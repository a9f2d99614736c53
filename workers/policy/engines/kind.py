"""The interface of a kind of LLM server, and the kinds that are installed.

A kind is a stateless class, registered by an entry point in the group `farm.engines`; the entry point's name is the
kind's name in `EngineInfo.kind`. It recognises its servers and knows the wires on which they accept token ids, and how
to pause them for new weights. All kinds share the chat route of the OpenAI API. The farm's own kinds are `vllm.py`,
`sglang.py`, `prorl.py` and `chat_only.py`; docs/concepts/engines.md shows how to write another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, cast

from farm import plugins
from farm.errors import NotFound
from farm.records.engine import EngineInfo
from workers.policy.engines.connection import EngineConnection
from workers.policy.engines.control import Control, NoControl
from workers.policy.engines.wire import Wire
from workers.policy.generation import EngineUnfit, Generation

log = logging.getLogger(__name__)

GROUP = "farm.engines"


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
    found: dict[str, EngineKind] = {}
    for name in sorted(plugins.installed(GROUP)):
        try:
            found[name] = _loaded(name)
        except Exception:
            log.exception("The %s plug-in %r cannot be used", GROUP, name)
    yield from sorted(found.items(), key=lambda item: item[1].is_fallback)


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
