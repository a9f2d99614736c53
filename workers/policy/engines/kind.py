"""The interface of a kind of LLM server, and the kinds that are installed.

A kind is a class without state that is named by an entry point in the group `farm.engines`; the entry point's name is
the name of the kind, in `EngineInfo.kind`. It recognises its servers, knows the wires on which they take token ids, and
how they are paused for new weights. All kinds have the chat route of the OpenAI API in common. Those that come with the
farm are `vllm.py`, `sglang.py`, `prorl.py` and `chat_only.py`; docs/concepts/engines.md shows how another is written.
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
    """The account that a server gives of itself; the model's card counts for what is left empty.

    `root` is the source of its model, a folder or a name on a hub; `control` says that it takes pause, resume and the
    naming of weight versions; `notes` are remarks for the operator, such as a flag that would add a capability.
    """

    version: str = ""
    root: str = ""
    context_tokens: int | None = None
    control: bool = False
    notes: tuple[str, ...] = ()


class EngineKind(Protocol):
    """One kind of LLM server. A class that derives from this one has its defaults."""

    health_paths: ClassVar[Sequence[str]] = ("/health",)
    """The routes of its health check; the first that it has counts."""
    is_fallback: ClassVar[bool] = False
    """True if it takes servers that it does not know: it is asked after the others, and failures on its wires only show
    that the server has no such wire."""

    async def identify(self, connection: EngineConnection, card: Mapping[str, Any]) -> Identity | None:
        """Return the identity of a server of this kind, None if it is of another; `card` is its model's, as listed.

        May raise what the connection raises, and EngineError if the server is of this kind, but cannot be used now.
        """
        ...

    def wires(self, info: EngineInfo) -> Sequence[Wire]:
        """Return the wires on which its servers may take token ids, the best first."""
        ...

    def control(self, info: EngineInfo, connection: EngineConnection) -> Control:
        """Return the control of a server; by default it has none, and the farm holds its own calls back."""
        return NoControl(connection.url)

    def remarks(self, first: Generation) -> Iterable[str]:
        """Yield remarks for the operator on what the first answer to token ids lacks."""
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
    """Yield all kinds by name, those that take any server last; one that cannot be imported is left out, and logged."""
    found: dict[str, EngineKind] = {}
    for name in sorted(plugins.installed(GROUP)):
        try:
            found[name] = _loaded(name)
        except Exception:
            log.exception("The %s plug-in %r cannot be used", GROUP, name)
    yield from sorted(found.items(), key=lambda item: item[1].is_fallback)


def wire_of(info: EngineInfo) -> Wire | None:
    """Return the wire on which an engine takes token ids; None if it takes none. Raises EngineUnfit."""
    if not info.token_in:
        return None
    for wire in kind(info.kind).wires(info):
        if wire.name == info.token_in:
            return wire
    raise EngineUnfit(f"engines of kind {info.kind!r} have no wire {info.token_in!r} here; restart this node")


def takes_guides(info: EngineInfo) -> bool:
    """Return whether an engine's answers can be held to a form on the wire that is used."""
    wire = wire_of(info)
    return wire is not None and wire.takes_guides
