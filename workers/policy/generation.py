"""The interface of an engine, and a generation in the common form of all wires: ids in, ids and metadata out."""

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
    """The address of an engine, `http://host:port/v1`, and its options; empty ones are detected."""

    url: str
    model: str = ""
    key: str = field(default="none", repr=False)
    tokenizer: str = ""
    """A folder with `tokenizer.json`, or a name on the Hugging Face hub."""
    tool_format: str = ""
    """The format of the model's tool calls; a name of `workers.policy.tool_calls`."""
    plain_chat: bool = False
    """True to send only health checks and chat requests that do not request token ids."""


class EngineBusy(EngineError):
    """A temporary refusal (429, 503, paused). `retry_after_s` is None if the engine does not send it."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(EngineError):
    """A faulty request: no engine would answer it, with any number of retries."""

    retryable = False


class EngineUnfit(EngineRefused):
    """A request that this engine cannot answer, but another may: wrong key, missing model or route."""


class ExpertsMissing(EngineUnfit):
    """A request for routed experts to an engine that gives none; it can serve all other requests."""


class ImagesRefused(EngineUnfit):
    """A conversation with images that the engine's model does not support; it can serve all others."""


class ImageUnreadable(EngineRefused):
    """A conversation with an image that the engine cannot decode; `reason` is the engine's message."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LogprobsMissing(EngineRefused):
    """A request for log-probabilities to an engine that gives none."""


class FormUnsupported(EngineRefused):
    """A request for a form of the answer that this engine, or the model's tool format, cannot guarantee."""


@dataclass(slots=True, kw_only=True)
class Generation(SampledTokens):
    """A sample from ids; `prompt_ids` are those reported by the engine, None if it reports none."""

    response_ids: TokenIds


@dataclass(slots=True, kw_only=True)
class SpelledCompletion(Completion):
    """A completion with the text of each response id; joined, they are the whole sampled text."""

    token_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue: an empty `model` is the engine's own; `session_id` identifies the rollout."""

    messages: Sequence[Message]
    max_tokens: int
    sampling: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    model: str = ""
    session_id: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """The routed experts to return for a call: `top_k` per token, from position `start` of its prompt on.

    `n_layers` is the number of layers in earlier calls; None if unknown.
    """

    top_k: int
    start: int = 0
    n_layers: int | None = None


OnIds: TypeAlias = Callable[[Sequence[int]], None]
"""Called with newly sampled ids as they arrive."""


class Control(Protocol):
    """The methods of Engine that control its server."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling by `mode`; with `drain`, return once nothing runs. Raises EngineError on failure."""
        ...

    async def resume(self) -> None: ...

    async def paused(self) -> bool | None:
        """Return whether it is paused; None if unknown."""
        ...

    async def set_version(self, version: str) -> None:
        """Name the current weights, without aborting calls."""
        ...

    async def load_weights(self, path: str) -> None:
        """Load weights from a path on the server, and drop its prefix cache. Raises EngineError on failure."""
        ...

    async def version(self) -> str:
        """Return the version of its current weights; empty if unknown."""
        ...


class Engine(Control, Protocol):
    """A client of one LLM server for one event loop; any number of calls may run at once.

    Cancelling a call closes its connection, so that the server stops generating. Errors: LimitReached(CONTEXT_FULL) if
    the prompt leaves no room for an answer; EngineBusy, EngineRefused, or EngineError for the rest.
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
        """Sample from ids; only if `info.token_in` names a wire. `on_ids` requests a stream.

        Raises EngineError for an id at or above `n_vocabulary`, for more than `max_tokens` ids, and for `experts` other
        than the requested ones; ExpertsMissing if there are none.
        """
        ...

    async def chat(self, request: ChatRequest) -> Completion:
        """Let the engine render and tokenise the messages."""
        ...

    async def healthy(self) -> bool:
        """Return whether it answers now; never raises, and takes a few seconds at most."""
        ...

    async def aclose(self) -> None: ...
