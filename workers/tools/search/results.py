"""Results of a search engine, and their text for the model. Neither their form nor their length is trusted.

An answer is JSON: {"results": [{"title": "...", "url": "https://...", "snippet": "..."}, ...]}, best first. `content`
may replace `snippet`, as in Tavily and SearXNG; other fields are ignored, results without `url` are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError

MAX_TITLE_CHARS = 200
MAX_URL_CHARS = 500
MAX_SNIPPET_CHARS = 600


class SearchResult(BaseModel):
    """One page of the results."""

    url: str
    title: str | None = None
    snippet: str | None = Field(default=None, validation_alias=AliasChoices("snippet", "content"))


def results_of(answer: bytes) -> list[SearchResult]:
    """Return the results of an engine's answer. Raises ValueError if it is not the JSON described above."""
    try:
        body: Any = json.loads(answer)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    result = body.get("results") if isinstance(body, dict) else None
    if not isinstance(result, list):
        raise ValueError("it has no list of `results`")
    results = []
    for each in result:
        try:
            results.append(SearchResult.model_validate(each))
        except ValidationError:
            continue
    return results


def format_results(results: Sequence[SearchResult]) -> str:
    """Return the results as numbered paragraphs; a page cannot fake further results."""
    return "\n\n".join(f"{number}. {_paragraph(result)}" for number, result in enumerate(results, start=1))


def _paragraph(result: SearchResult) -> str:
    title = _flat(result.title or "", MAX_TITLE_CHARS) or "(no title)"
    rows = [title, _flat(result.url, MAX_URL_CHARS), _flat(result.snippet or "", MAX_SNIPPET_CHARS)]
    return "\n   ".join(row for row in rows if row)


def _flat(text: str, max_chars: int) -> str:
    """Return a text on one line, without unprintable characters, at most `max_chars` long."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * max_chars])
    flat = " ".join(printable.split())
    return flat if len(flat) <= max_chars else f"{flat[:max_chars]}..."
