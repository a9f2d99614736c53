"""One generation as all wires give it: ids in, ids out, with what the engine says of how it came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from farm.engine import EngineInfo, PauseMode
from farm.errors import EngineError
from farm.request import SamplingParams
from farm.trajectory import LogProbs, Message, TokenIds, VersionSpan
from workers.interfaces import Completion


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is, `http://host:port/v1`, and what was said of it when it was added; empty is found out."""

    url: str
    model: str = ""
    key: str = field(default="none", repr=False)
    tokenizer: str = ""
    """A folder with `tokenizer.json`, or a name on the Hugging Face hub."""
    tool_format: str = ""
    """How its model writes tool calls; a name of `workers.policy.parsing`."""


class EngineBusy(EngineError):
    """It asks to be left alone for a while (429, 503, paused). `retry_after_s` as it says; None if it does not."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineError):
    """It will not answer this request however often it is asked, and nor will its like: the request is at fault."""

    retryable = False


class EngineUnfit(EngineRefused):
    """It will not answer this request, but its like may: it wants another key, or lacks the model or the route."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: `response_ids` and `response_logprobs` [n], the end-of-turn token included where sampled.

    `prompt_ids` are those that the engine says it saw, None if it does not say. `finish_reason` is `stop`, `length`,
    `abort` (ended from outside, with what was sampled so far) or the engine's own. `versions` cover [0, n).
    """

    response_ids: TokenIds
    response_logprobs: LogProbs | None
    finish_reason: str
    stop_reason: str | int | None = None
    prompt_ids: TokenIds | None = None
    versions: tuple[VersionSpan, ...] = ()
    n_cached_tokens: int | None = None


OnIds: TypeAlias = Callable[[Sequence[int]], None]
"""Called with newly sampled ids as they come."""


class Engine(Protocol):
    """A client of one LLM server, for one event loop; any number of calls at once.

    A call that is cancelled closes its connection, so that the server stops generating. Errors: EngineBusy,
    EngineRefused, EngineError for the rest; LimitReached(CONTEXT_FULL) if the prompt leaves no room for an answer.
    """

    address: EngineAddress
    info: EngineInfo

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        on_ids: OnIds | None = None,
    ) -> Generation:
        """Sample from ids; only where `info.token_in` names a wire. `on_ids` asks for a stream."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Let the engine render and tokenise the messages itself."""
        ...

    async def healthy(self) -> bool:
        """Whether it answers now; never raises, never waits for more than a few seconds."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling, as `mode` says; with `drain`, returns once nothing runs. EngineError if it cannot."""
        ...

    async def resume(self) -> None: ...

    async def paused(self) -> bool | None:
        """Whether it is paused; None if it does not say."""
        ...

    async def set_version(self, version: str) -> None:
        """Name the weights it has now, without cutting what runs."""
        ...

    async def version(self) -> str:
        """What it calls its weights now; empty if it does not say."""
        ...

    async def aclose(self) -> None: ...
