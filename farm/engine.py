"""An LLM server as the farm knows it: where it is, what it can do, and whether it may be asked now."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

PauseMode: TypeAlias = Literal["drain", "keep", "abort"]
"""How running calls are treated when engines pause for new weights: they end first; they freeze and go on afterwards;
they are cut, and what was sampled so far is continued under the new weights."""


class EngineInfo(BaseModel):
    """What an engine can do, as found by asking it. Unknown fields are let pass: a newer farm may have written it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Literal["vllm", "sglang", "openai"] = "openai"
    version: str = ""
    model: str = ""
    """The model it lists first."""
    root: str = ""
    """Where it says that its model comes from: a folder, or a name on a hub."""
    context_tokens: int | None = None
    token_in: Literal["", "generate", "completions", "sglang"] = ""
    """The wire that takes token ids: vLLM's /inference/v1/generate or /v1/completions, SGLang's /generate; or none."""
    token_out: bool = False
    """Whether answers can hold the sampled ids with their log-probabilities."""
    logprobs: Literal["", "raw", "processed"] = ""
    """Log-probabilities from before (raw) or after temperature and filters (processed); empty if it gives none."""
    control: bool = False
    """Whether it takes pause, resume and the naming of weight versions."""
    notes: tuple[str, ...] = ()
    """What a person should know, such as a flag that would make it more able."""
