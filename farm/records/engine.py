"""The capabilities of an LLM server."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

PauseMode: TypeAlias = Literal["drain", "keep", "abort"]
"""The treatment of running calls when engines pause for new weights. `drain`: they end first. `keep`: they freeze and
continue afterwards. `abort`: they are cut and continue under the new weights from the tokens sampled so far."""

BRIDGE_OWNER = "farm-bridge"
"""The owner of the model listed by the bridge to a trainer's engine (`farm.adapters.engine_bridge`)."""


class EngineInfo(BaseModel):
    """The probed capabilities of an engine. Unknown fields are ignored: a newer farm may have written them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: str = "openai"
    """The kind of server: the name of an entry point in `farm.engines`."""
    version: str = ""
    model: str = ""
    """The first model that it lists."""
    root: str = ""
    """The source of its model as it reports it: a folder, or a name on a hub."""
    context_tokens: int | None = None
    token_in: str = ""
    """The API route for token ids, by its name within the kind; empty without one."""
    token_out: bool = False
    """True if answers can contain the sampled ids with their log-probabilities."""
    logprobs: Literal["", "raw", "processed"] = ""
    """Log-probabilities before (raw) or after (processed) temperature and filters; empty if it returns none."""
    control: bool = False
    """True if it supports pause, resume and naming weight versions."""
    tool_format: str = ""
    """The format in which a node parses tool calls from its text; `none` if its chat template has no known format;
    empty if the engine parses them itself, or no node has checked yet."""
    notes: tuple[str, ...] = ()
    """Notes for the operator, such as a flag that would add a capability."""
