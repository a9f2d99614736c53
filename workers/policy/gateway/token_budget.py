"""The token limits of a call, in the fields by which each API's list of models reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workers.plugins.interfaces import Policy


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Maximum tokens of an answer, and of a prompt with its answer; None if unknown."""

    output_tokens: int
    context_tokens: int | None

    @staticmethod
    def of(policy: Policy, output_tokens: int) -> TokenBudget:
        context_tokens = getattr(policy, "context_tokens", None)
        fits = output_tokens if context_tokens is None else min(output_tokens, context_tokens)
        return TokenBudget(fits, context_tokens)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a listed model, of all vendors; unknown limits are omitted."""
        output = dict.fromkeys(("max_output_tokens", "max_tokens", "outputTokenLimit"), self.output_tokens)
        if self.context_tokens is None:
            return output
        context = ("context_length", "context_window", "max_model_len", "max_input_tokens", "inputTokenLimit")
        return {**output, **dict.fromkeys(context, self.context_tokens)}
