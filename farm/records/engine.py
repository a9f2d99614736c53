"""Records of an LLM server: its capabilities, and the rule by which its weights are current.

An engine gets calls only while the weights that it was last known to have are those that the farm plays with. An
engine that is new, was out when they were named, or came back with others lacks them until they are pushed to it and
named; until then it is shown so everywhere.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

PauseMode: TypeAlias = Literal["drain", "keep", "abort"]
"""The treatment of running calls when engines pause for new weights: they end first; they freeze and go on afterwards;
they are cut, and continued under the new weights from the tokens sampled so far."""

BRIDGE_OWNER = "farm-bridge"
"""The owner of the model that the bridge to a trainer's engine lists (`farm.adapters.engine_bridge`)."""


def lacks_weights(version: str, engine_version: str, *, to_name: bool) -> bool:
    """Return whether an engine lacks the farm's weights `version`; `to_name`: it is about to be sent their name."""
    return version != engine_version and not to_name


class EngineInfo(BaseModel):
    """The probed capabilities of an engine. Unknown fields are ignored: a newer farm may have written them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: str = "openai"
    """The kind of server: the name of an entry point in `farm.engines`."""
    version: str = ""
    model: str = ""
    """The model it lists first."""
    root: str = ""
    """The source of its model as it reports it: a folder, or a name on a hub."""
    context_tokens: int | None = None
    token_in: str = ""
    """The wire that takes token ids, by its name within the kind; empty if none does."""
    token_out: bool = False
    """True if answers can hold the sampled ids with their log-probabilities."""
    logprobs: Literal["", "raw", "processed"] = ""
    """Log-probabilities from before (raw) or after temperature and filters (processed); empty if it gives none."""
    control: bool = False
    """True if it takes pause, resume and the naming of weight versions."""
    tool_format: str = ""
    """The format in which a node reads tool calls from its text, `none` if its chat template shows none that is known;
    empty if the engine reads them itself, or no node has said."""
    notes: tuple[str, ...] = ()
    """Remarks for the operator, such as a flag that would add a capability."""
