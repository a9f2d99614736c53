"""Name to plug-in, typed: the entry-point groups of the surface in `workers/interfaces.py`."""

from __future__ import annotations

from functools import cache
from typing import cast

from farm.errors import NotFound, UnknownHandler
from farm.plugins import installed, load
from workers.interfaces import Agent, Handler, SandboxProvider, ToolFactory

HANDLERS = "farm.handlers"
SANDBOXES = "farm.sandboxes"
TOOLS = "farm.tools"
AGENTS = "farm.agents"


@cache
def handler(data_source: str) -> Handler:
    """The handler of a data_source. Raises UnknownHandler."""
    try:
        return cast(Handler, load(HANDLERS, data_source)())
    except NotFound as missing:
        raise UnknownHandler(str(missing)) from None


@cache
def sandbox(kind: str) -> SandboxProvider:
    """The provider of one kind of sandbox on this node."""
    return cast(SandboxProvider, load(SANDBOXES, kind)())


@cache
def agent(name: str) -> Agent:
    return cast(Agent, load(AGENTS, name)())


def tool(name: str) -> ToolFactory:
    """Makes one rollout's tool from its sandbox."""
    return cast(ToolFactory, load(TOOLS, name))


def best_sandbox() -> str:
    """The kind to use where the choice is open: the first of these that can run on this node. Raises NotFound."""
    reasons = []
    for kind in ("singularity", "namespace"):
        if kind not in installed(SANDBOXES):
            continue
        missing = sandbox(kind).missing()
        if not missing:
            return kind
        reasons.append(f"{kind}: {missing}")
    raise NotFound("no sandbox can run on this node: " + "; ".join(reasons))
