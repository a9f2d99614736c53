"""The log-probabilities of an answer in each API's form: of every sampled token, as recorded.

The tokens' texts, joined, are the whole sampled text, tool calls included. A token that is only part of a character has
an empty text; the token that completes the character has all of it. The end of a turn is a token without text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workers.plugins.interfaces import Completion
from workers.policy.generation import SpelledCompletion

if TYPE_CHECKING:
    from openai.types.responses.response_output_text_param import Logprob


def of_openai(completion: Completion) -> list[Logprob]:
    """Return them in the form of both OpenAI APIs; empty if they were not requested."""
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, _, logprob in _tokens(completion)
    ]


def of_google(completion: Completion) -> dict[str, Any]:
    """Return the fields of a candidate; empty if they were not requested."""
    tokens = list(_tokens(completion))
    if not tokens:
        return {}
    chosen = [{"token": text, "tokenId": number, "logProbability": logprob} for text, number, logprob in tokens]
    mean = sum(logprob for *_, logprob in tokens) / len(tokens)
    return {"logprobsResult": {"chosenCandidates": chosen, "topCandidates": []}, "avgLogprobs": mean}


def _tokens(completion: Completion) -> Iterator[tuple[str, int, float]]:
    ids, logprobs = completion.response_ids, completion.response_logprobs
    if isinstance(completion, SpelledCompletion) and ids is not None and logprobs is not None:
        yield from zip(completion.token_texts, map(int, ids), map(float, logprobs), strict=True)
