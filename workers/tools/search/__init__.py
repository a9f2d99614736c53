"""The `search` tool: asks the search engine that FARM_SEARCH names, from the worker, so that no key is in a sandbox.

It is off by default. A handler that lists it where it is off or set wrongly is told so before the policy is asked
anything: such a rollout ends, is not tried again and never scored.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, StringConstraints

from farm.errors import HandlerError
from farm.settings import Settings, settings
from workers.interfaces import Observation, Sandbox
from workers.tools import Arguments
from workers.tools.search.asking import Asking
from workers.tools.search.domains import Domains
from workers.tools.search.engines import Question, engine
from workers.tools.search.results import told

MAX_RESULTS = 10


class SearchArguments(Arguments):
    query: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=400)] = Field(
        description="What to look for: a few words."
    )
    max_results: int = Field(default=5, ge=1, le=MAX_RESULTS, description="How many results to show at most.")


class SearchTool:
    """See `workers.interfaces.Tool`. Needs no sandbox. The settings are those of the process if none are given."""

    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Search the web. Gives the title, the address and a few lines of each page that was found; the pages "
        "themselves cannot be opened."
    )
    arguments: ClassVar[type[BaseModel]] = SearchArguments

    def __init__(self, sandbox: Sandbox | None, chosen: Settings | None = None) -> None:
        """Raises HandlerError, not to be tried again, if search is off or its settings are wrong."""
        chosen = chosen or settings()
        if not chosen.search:
            raise HandlerError(
                "the tool `search` is not switched on: set FARM_SEARCH on every node, or take it out of the handler's "
                "tools",
                retryable=False,
            )
        try:
            self._asking = Asking(engine(chosen.search, chosen.search_key))
            self._domains = Domains.of(chosen.search_allowed, chosen.search_blocked)
        except ValueError as error:
            raise HandlerError(f"the tool `search` cannot be used: {error}", retryable=False) from None

    async def call(self, arguments: SearchArguments, timeout_s: float) -> Observation:
        """Numbered results. ToolError if the query is refused; AgentError if the engine cannot be asked."""
        question = Question(arguments.query, arguments.max_results, self._domains)
        found = await self._asking.results(question, timeout_s)
        shown = [result for result in found if self._domains.let_through(result.url)][: arguments.max_results]
        return Observation(told(shown) or "Nothing was found. Try other words.")

    async def close(self) -> None:
        await self._asking.close()
