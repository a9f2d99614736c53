"""The interface of an engine, and one generation in the form that all wires give: ids in, ids out, with metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from farm.errors import EngineError
from farm.records.engine import EngineInfo, PauseMode
from farm.records.request import SamplingParams
from farm.records.trajectory import Message, SampledTokens, TokenIds
from workers.plugins.interfaces import Completion


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of an engine, `http://host:port/v1`, and the options it was added with; empty ones are detected."""

    url: str
    model: str = ""
    key: str = field(default="none", repr=False)
    tokenizer: str = ""
    """A folder with `tokenizer.json`, or a name on the Hugging Face hub."""
    tool_format: str = ""
    """The format in which its model writes tool calls; a name of `workers.policy.tool_calls`."""
    plain_chat: bool = False
    """True to send it chat requests that ask for no token ids, and nothing else but health checks."""


class EngineBusy(EngineError):
    """A refusal for a while (429, 503, paused). `retry_after_s` is None if the engine does not send it."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineError):
    """A request at fault: neither this engine nor another would answer it, with any number of retries."""

    retryable = False


class EngineUnfit(EngineRefused):
    """A request that this engine cannot answer, but another may: it requires another key, or lacks model or route."""


class ExpertsMissing(EngineUnfit):
    """A request for routed experts to an engine that gives none, and that is fit for all other requests."""


class ImagesRefused(EngineUnfit):
    """A conversation with images for an engine whose model takes none, or not so many; it is fit for all others."""


class ImageUnreadable(EngineRefused):
    """A conversation with an image that the engine cannot decode; `said` are the engine's words."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class LogprobsMissing(EngineRefused):
    """A request for log-probabilities to an engine that gives none."""


class FormUnsupported(EngineRefused):
    """A request whose answer must be of a form that this engine, or this model's tool format, cannot be held to."""


@dataclass(slots=True, kw_only=True)
class Generation(SampledTokens):
    """A sample from ids; `prompt_ids` are those that the engine reports, None if it does not."""

    response_ids: TokenIds


@dataclass(slots=True, kw_only=True)
class SpelledCompletion(Completion):
    """A completion with the text of each of its response ids: joined they are all that was sampled."""

    token_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to go on with, and how: `model` is the engine's own if empty, `session_id` names the rollout."""

    messages: Sequence[Message]
    max_tokens: int
    sampling: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    model: str = ""
    session_id: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """The routed experts that are wanted of a call: `top_k` of each token from position `start` of its prompt on.

    `n_layers` are those that calls before had; None if that is not known.
    """

    top_k: int
    start: int = 0
    n_layers: int | None = None


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
        n_vocabulary: int | None = None,
        experts: ExpertRange | None = None,
    ) -> Generation:
        """Sample from ids; only where `info.token_in` names a wire. `on_ids` requests a stream.

        Raises EngineError for an id at or above `n_vocabulary`, for more than `max_tokens` ids, and for other `experts`
        than are asked for; ExpertsMissing for none.
        """
        ...

    async def chat(self, request: ChatRequest) -> Completion:
        """Let the engine render and tokenise the messages itself."""
        ...

    async def healthy(self) -> bool:
        """Return whether it answers now; never raises, never waits for more than a few seconds."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling by `mode`; with `drain`, return once nothing runs. Raises EngineError if it cannot."""
        ...

    async def resume(self) -> None: ...

    async def paused(self) -> bool | None:
        """Return whether it is paused; None if it does not tell."""
        ...

    async def set_version(self, version: str) -> None:
        """Name the weights it has now, without aborting calls."""
        ...

    async def load_weights(self, path: str) -> None:
        """Load weights from a path on the server, and drop its prefix cache. Raises EngineError if it cannot."""
        ...

    async def version(self) -> str:
        """Return the version of its weights now; empty if it does not tell."""
        ...

    async def aclose(self) -> None: ...
