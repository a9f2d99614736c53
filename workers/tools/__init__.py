"""What the tools that work in a sandbox have in common: they need one."""

from __future__ import annotations

from farm.errors import ToolError
from workers.interfaces import Sandbox


def needed(sandbox: Sandbox | None, tool: str) -> Sandbox:
    """The sandbox. Raises ToolError if the rollout has none."""
    if sandbox is None:
        raise ToolError(f"`{tool}` cannot be used here: this problem is played without a sandbox.")
    return sandbox


def out_of_time(timeout_s: float, more: str) -> str:
    """The line that ends the output of a call that was cut off."""
    return f"[stopped: it did not finish within {timeout_s:g} seconds; {more}]"


def lines(*parts: str) -> str:
    """Parts of an observation, each on a line of its own, empty ones left out."""
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))
