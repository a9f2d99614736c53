"""The `search` tool: queries the search engine of FARM_SEARCH from the worker, so that no key is in a sandbox.

It is off by default. If a handler lists it but it is off or misconfigured, the rollout fails before the first model
call, is not retried, and is never scored.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, StringConstraints

from farm.errors import HandlerError
from farm.settings import Settings, settings
from workers.plugins.interfaces import Observation, Sandbox
from workers.tools import Arguments
from workers.tools.search.search_engines import Domains, SearchClient, SearchQuery, engine, format_results

MAX_RESULTS = 10


class SearchArguments(Arguments):
    query: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=400)] = Field(
        description="What to look for: a few words."
    )
    max_results: int = Field(default=5, ge=1, le=MAX_RESULTS, description="How many results to show at most.")


class SearchTool:
    """A `workers.plugins.interfaces.Tool`. Needs no sandbox. `chosen` defaults to the settings of the process."""

    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Search the web. Gives the title, the address and a few lines of each page that was found; the pages "
        "themselves cannot be opened."
    )
    arguments: ClassVar[type[BaseModel]] = SearchArguments

    def __init__(self, sandbox: Sandbox | None, chosen: Settings | None = None) -> None:
        """Raise HandlerError, not retryable, if search is off or its settings are wrong."""
        chosen = chosen or settings()
        if not chosen.search:
            raise HandlerError(
                "the tool `search` is off: set FARM_SEARCH on every node, or remove it from the handler's tools",
                retryable=False,
            )
        try:
            self._asking = SearchClient(engine(chosen.search, chosen.search_key))
            self._domains = Domains.of(chosen.search_allowed, chosen.search_blocked)
        except ValueError as error:
            raise HandlerError(f"the tool `search` cannot be used: {error}", retryable=False) from None

    async def call(self, arguments: SearchArguments, timeout_s: float) -> Observation:
        """Return numbered results. Raises ToolError for a refused query, AgentError for an unavailable engine."""
        question = SearchQuery(arguments.query, arguments.max_results, self._domains)
        value = await self._asking.results(question, timeout_s)
        shown = [result for result in value if self._domains.let_through(result.url)][: arguments.max_results]
        return Observation(format_results(shown) or "Nothing was found. Try other words.")

    async def close(self) -> None:
        await self._asking.close()
