"""Loads plug-ins by name, typed: the entry-point groups of `workers/plugins/interfaces.py`."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, cast

from farm.errors import NotFound, UnknownHandler
from farm.plugins import installed, load
from workers.plugins.handler import Handler
from workers.plugins.interfaces import Agent, SandboxProvider, ToolFactory
from workers.plugins.plugin_faults import described

log = logging.getLogger(__name__)

HANDLERS = "farm.handlers"
SANDBOXES = "farm.sandboxes"
TOOLS = "farm.tools"
AGENTS = "farm.agents"


def handler(data_source: str) -> type[Handler[Any]]:
    """Return the handler of a data_source. Raises UnknownHandler."""
    try:
        handler_class = load(HANDLERS, data_source)
    except NotFound as missing:
        raise UnknownHandler(str(missing)) from None
    if not (isinstance(handler_class, type) and issubclass(handler_class, Handler)):
        base = f"{Handler.__module__}.{Handler.__qualname__}"
        raise UnknownHandler(
            f"The entry point of handler {data_source!r} names {handler_class!r}; name a subclass of {base}"
        )
    return handler_class


@cache
def sandbox(kind: str) -> SandboxProvider:
    """Return the provider of one kind of sandbox on this node."""
    return cast(SandboxProvider, load(SANDBOXES, kind)())


@cache
def agent(name: str) -> Agent:
    return cast(Agent, load(AGENTS, name)())


def tool(name: str) -> ToolFactory:
    """Return the factory that makes a rollout's tool from its sandbox."""
    return cast(ToolFactory, load(TOOLS, name))


def chosen_sandbox(*kinds: str) -> SandboxProvider:
    """Return the provider of the first of these kinds that is not `auto`, else of the best kind. Raises NotFound."""
    return sandbox(next((kind for kind in kinds if kind != "auto"), "") or best_sandbox())


def best_sandbox() -> str:
    """Return the kind of highest priority that can run here, for `auto`. Raises NotFound."""
    reasons = []
    for kind in _by_priority():
        missing = _missing(kind)
        if not missing:
            return kind
        reasons.append(f"{kind}: {missing}")
    raise NotFound(
        "no sandbox can run on this node: " + ("; ".join(reasons) or "no kind that `auto` may choose is installed")
    )


@cache
def _by_priority() -> list[str]:
    """Return the installed kinds that `auto` may choose, by priority, then name. Skips kinds that fail to load."""
    priorities = {kind: _priority(kind) for kind in installed(SANDBOXES)}
    return sorted((kind for kind in priorities if priorities[kind] >= 0), key=lambda kind: (-priorities[kind], kind))


def _priority(kind: str) -> int:
    try:
        return int(getattr(sandbox(kind), "priority", 0))
    except Exception as error:
        # A broken third-party kind fails only the batches that name it.
        log.warning("Sandbox plug-in %s cannot be loaded: %s", kind, described(error))
        return -1


def _missing(kind: str) -> str:
    try:
        return sandbox(kind).missing()
    except Exception as error:
        return f"its missing() broke: {described(error)}"
