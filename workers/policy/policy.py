"""The policy of one rollout: messages in, a completion out, with exactly the ids that were sampled.

On an engine that accepts token ids, the prompt is the ids of the earlier turns plus the new suffix; any other engine
renders the messages itself, and the call is as exact as its answer. An answer aborted by a weight update is resumed
from the ids sampled so far, so one call may span several versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from farm.errors import EngineError, InvalidRequest, LimitReached, StaleRollout, WeightsMissing
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome, is_too_old
from farm.records.trajectory import NO_VERSION, Message, VersionSpan, version_number
from farm.seeds import call_seed
from workers.plugins.interfaces import Completion, OnDelta
from workers.policy import tool_calls
from workers.policy.answer_form import FormedSampling, guide, is_spelled
from workers.policy.engines.kind import takes_guides
from workers.policy.generation import (
    ChatRequest,
    Engine,
    EngineAddress,
    EngineRefused,
    EngineUnfit,
    ExpertsMissing,
    FormUnsupported,
    ImagesRefused,
    ImageUnreadable,
    LogprobsMissing,
)
from workers.policy.message_images import digests_of, media_in
from workers.policy.routing.model_texts import model_text_of
from workers.policy.routing.router import Call, StickyRouter
from workers.policy.token_completion import Interrupted, StreamForwarder, TokenCompletion
from workers.policy.tokens.long_texts import LongTexts
from workers.policy.tokens.messages import n_chars, n_chars_at_most
from workers.policy.tokens.session import FIRST, Prompt, TokenSession
from workers.policy.tokens.template import TemplateError
from workers.policy.tokens.tokenizer import ModelText

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHARS_PER_TOKEN = 4
_ANSWER_TOKENS = 256
"""The assumed length of a rollout's first answer, for load balancing."""

_MAX_CHARS_PER_TOKEN = 20
"""No tokenizer averages more over a prompt. Longer texts are refused without encoding, to save time and memory."""

_MAX_CHARS = 4_000_000
"""The longest request to an engine with an unknown context: the text of a million tokens."""

_LONG_CHARS = 100_000
"""Text length from which encoding takes tens of milliseconds."""

_LONG_REQUEST_CHARS = 1_000_000
"""Request length from which rendering takes tens of milliseconds."""

_TAIL_IDS = 16
"""The end of a prompt, in which a reasoning tag may be open."""

_KEPT_KINDS = (WeightsMissing, FormUnsupported, ImagesRefused, LogprobsMissing)
"""The error types that callers distinguish."""

_MOVED = "branch: the calls before were rendered by an engine, or have other token ids"


@dataclass(frozen=True, slots=True)
class PromptRules:
    """The rules of a batch for its rollouts' prompts, and for the staleness of their weights."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_rewritten: bool = False
    max_staleness: int | None = None
    restart_stale: bool = False
    max_row_tokens: int | None = None
    max_response_tokens: int | None = None
    max_prompt_tokens: int | None = None

    def room(self, prompt: Prompt) -> int | None:
        """Return the tokens that may follow a prompt; None if its row has no limit. Raises LimitReached if none may."""
        n_ids, n_after_first = len(prompt.ids), len(prompt.ids) - prompt.n_first
        rooms = []
        if self.max_prompt_tokens is not None and n_ids > self.max_prompt_tokens:
            raise _full("the prompt", n_ids, "max_prompt_tokens", self.max_prompt_tokens)
        for name, most, n_taken in (
            ("max_row_tokens", self.max_row_tokens, n_ids),
            ("max_response_tokens", self.max_response_tokens, n_after_first),
        ):
            if most is None:
                continue
            if n_taken >= most:
                raise _full("its training row", n_taken, name, most)
            rooms.append(most - n_taken)
        return min(rooms, default=None)


class RolloutPolicy:
    """The policy of one rollout, on engines chosen by its router. Concurrent conversations may share it."""

    def __init__(
        self, router: StickyRouter, rollout_id: str, model: str = "", rules: PromptRules | None = None
    ) -> None:
        self._router = router
        self._rollout_id = rollout_id
        self._model = model
        self._rules = rules or PromptRules()
        self._texts: dict[EngineAddress, ModelText | None] = {}
        self._sessions: dict[str, TokenSession] = {}
        self._turn = asyncio.Lock()
        self._long_texts = LongTexts()
        self._oldest: int | None = None
        self._n_requests = 0
        self._n_calls = 0
        self._n_sampled = 0
        self._n_layers: int | None = None

    @property
    def blocked(self) -> str:
        return self._router.blocked

    @property
    def paused_s(self) -> float:
        return self._router.paused_s

    @property
    def context_tokens(self) -> int | None:
        """Maximum tokens of a prompt and its answer together; None if unknown."""
        known = (self._router.context_tokens, self._rules.max_row_tokens, self._rules.max_prompt_tokens)
        return min((each for each in known if each is not None), default=None)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """Implement `Policy.complete`. Raises StaleRollout when the rollout's weights have become too old."""
        number, self._n_requests = self._n_requests, self._n_requests + 1
        if sampling.seed is not None:
            sampling = sampling.model_copy(update={"seed": call_seed(sampling.seed, number)})
        request = ChatRequest(
            messages, max_tokens, sampling, tools, self._model, self._rollout_id, self._rules.template_kwargs
        )
        try:
            pending = _PendingRequest(request, on_delta, self._n_layers)
            call = Call(self._load(messages), max_tokens)
            completion = await self._router.answer(call, lambda engine: self._ask(engine, pending))
        except EngineError as error:
            raise _named(error, self._rollout_id) from error
        self._n_calls += 1
        self._n_sampled += completion.n_response_tokens
        if completion.routed_experts is not None and completion.routed_experts.ids is not None:
            self._n_layers = completion.routed_experts.ids.shape[1]
        self._remember(completion)
        return completion

    async def _ask(self, engine: Engine, pending: _PendingRequest) -> Completion:
        self._check_age(self._router.newest_version)
        _check_size(engine, pending)
        # For an engine that does not name its weights, the farm's version at the start of the call counts.
        version = self._router.version_of(engine.address.url)
        # Ids cannot represent an image: the engine renders the prompt and returns its ids.
        text = await self._text(engine) if engine.info.token_in and not pending.has_images else None
        if text is not None:
            if pending.media:
                raise EngineRefused(
                    f"a message has a part of type {pending.media!r}, which token ids cannot represent: only an "
                    "agent program's images reach an engine, with agent_requests.images `engine`"
                )
            return await self._exact(engine, text, pending, version)
        if is_spelled(pending.request.sampling):
            raise LogprobsMissing(f"engine {engine.address.url} gives no log-probabilities")
        if pending.request.sampling.routed_experts:
            raise ExpertsMissing(
                f"engine {engine.address.url} accepts no token ids for this call, and gives no routed_experts: use "
                "another, or leave routed_experts out of the batch's sampling"
            )
        return await pending.chat(engine, version)

    async def _text(self, engine: Engine) -> ModelText | None:
        if engine.address not in self._texts:
            self._texts[engine.address] = await model_text_of(engine.address, engine.info)
        return self._texts[engine.address]

    async def _exact(self, engine: Engine, text: ModelText, pending: _PendingRequest, version: str) -> Completion:
        session = self._session(text)
        try:
            call = await pending.call_on(engine, text, lambda: self._prompt(session, pending), self._rules.room)
        except TemplateError as error:
            raise EngineRefused(f"engine {engine.address.url}: {error}") from error
        except InvalidRequest as error:
            raise EngineUnfit(f"engine {engine.address.url}: {error}") from error
        while not call.ended:
            await call.resume(engine, self._model, self._rollout_id, version)
        parsed = call.parsed()
        message = tool_calls.message(parsed)
        async with self._turn:
            session.commit(call.prompt, call.response_ids, message)
        return call.completion(engine.address.url, message, parsed.n_invalid)

    async def _prompt(self, session: TokenSession, pending: _PendingRequest) -> Prompt:
        """Return the ids to sample from. The session is locked only for its draft, not while a long text is encoded."""
        moved, begin = self._n_calls > 0, partial(session.draft, pending.request.messages, pending.request.tools)
        async with self._turn:
            draft = begin() if pending.n_chars_at_most < _LONG_REQUEST_CHARS else await _in_thread(begin)
        prompt = draft.encode() if draft.n_chars < _LONG_CHARS else await self._long_texts.run(draft.encode)
        # Earlier calls used another tokenizer's ids, or none.
        return replace(prompt, begins=_MOVED) if moved and prompt.begins == FIRST else prompt

    def _session(self, text: ModelText) -> TokenSession:
        if text.name not in self._sessions:
            self._sessions[text.name] = TokenSession(
                text, template_kwargs=self._rules.template_kwargs, keep_rewritten=self._rules.keep_rewritten
            )
        return self._sessions[text.name]

    def _load(self, messages: Sequence[Message]) -> int:
        """Return the estimated load of a call, in tokens: the new part of its prompt, plus the answer."""
        answer = self._n_sampled // self._n_calls if self._n_calls else _ANSWER_TOKENS
        new = messages if self._n_calls == 0 else messages[-1:]
        return sum(len(str(message.get("content") or "")) for message in new) // _CHARS_PER_TOKEN + answer + 1

    def _remember(self, completion: Completion) -> None:
        """Record the versions of a completion, and check its age: this call may be the last."""
        versions = [span.version for span in completion.versions] or [completion.policy_version]
        known = [number for number in map(version_number, versions) if number != NO_VERSION]
        if known:
            self._oldest = min(known) if self._oldest is None else min(self._oldest, *known)
            self._check_age(str(max(known)))
        self._check_age(self._router.newest_version)

    def _check_age(self, newest: str) -> None:
        allowed = self._rules.max_staleness
        if not is_too_old(self._oldest, newest, allowed):
            return
        raise StaleRollout(
            f"{self._rollout_id}: too old for weights {newest}: it began with {self._oldest}, and its batch "
            f"allows max_staleness {allowed}",
            restart=self._rules.restart_stale,
        )


class _PendingRequest:
    """One request and its progress, kept when another engine takes over."""

    def __init__(self, request: ChatRequest, on_delta: OnDelta | None, n_layers: int | None) -> None:
        self.request = request
        self._n_layers = n_layers
        self._on_delta = on_delta
        self._calls: dict[str, TokenCompletion] = {}
        self.n_chars_at_most = n_chars_at_most(request.messages, request.tools)
        self.has_images = bool(digests_of(request.messages))
        self.media = media_in(request.messages)

    async def call_on(
        self,
        engine: Engine,
        text: ModelText,
        prompt: Callable[[], Awaitable[Prompt]],
        room: Callable[[Prompt], int | None],
    ) -> TokenCompletion:
        """Return the answer in this tokenizer's ids, begun with `prompt` unless it has begun; at most `room` tokens."""
        if text.name not in self._calls:
            first_prompt = await prompt()
            most = room(first_prompt)
            max_tokens = self.request.max_tokens if most is None else min(self.request.max_tokens, most)
            self._calls[text.name] = self._new_call(engine, text, first_prompt, max_tokens)
        call = self._calls[text.name]
        self._check_begun(call)
        return call

    def _new_call(self, engine: Engine, text: ModelText, prompt: Prompt, max_tokens: int) -> TokenCompletion:
        sampling = self.request.sampling
        opened = tool_calls.opens_reasoning(text.tokenizer.decode(prompt.ids[-_TAIL_IDS:]))
        tool_format = engine.address.tool_format or tool_calls.detect(text.template.source)
        sampling = self._formed(engine, sampling, tool_format, opened)
        if isinstance(sampling, FormedSampling) and sampling.tool_choice == "none":
            tool_format = "none"
        elif self.request.tools and tool_format == "none" and not engine.address.tool_format:
            # Its calls would be taken for the answer, and scored.
            raise InvalidRequest(
                f"the request has tools, and the chat template of {text.name} shows no supported format of calls: "
                f"name one of {', '.join(tool_calls.FORMATS)} as the engine's tool_format; `none` takes all text for "
                "the answer"
            )
        parser = tool_calls.parser(tool_format, template=text.template.source, opened=opened, tools=self.request.tools)
        live = None
        if self._on_delta is not None:
            live = StreamForwarder(text.tokenizer, parser, sampling.stop, self._on_delta)
        return TokenCompletion(prompt, text.tokenizer, parser, sampling, max_tokens, live, self._n_layers)

    def _formed(self, engine: Engine, sampling: SamplingParams, tool_format: str, opened: bool) -> SamplingParams:
        """Return the sampling with the form's guide. Raises FormUnsupported if a required guide is impossible."""
        if not isinstance(sampling, FormedSampling) or not sampling.needs_guide:
            return sampling
        form = guide(sampling, tool_format, opened, self.request.tools) if takes_guides(engine.info) else {}
        if not form and sampling.required:
            raise FormUnsupported(f"engine {engine.address.url} cannot answer in the requested form")
        return sampling.model_copy(update={"guide": form or None})

    async def chat(self, engine: Engine, version: str) -> Completion:
        """Return the answer of an engine that renders and tokenises the messages itself, streamed in one piece."""
        self._check_begun(None)
        completion = await engine.chat(self.request)
        if self._on_delta is not None:
            for delta in tool_calls.deltas(completion.response):
                self._on_delta(delta)
        return _dated(completion, version)

    def _check_begun(self, goes_on: TokenCompletion | None) -> None:
        """Raise Interrupted if the beginning of another answer has been streamed."""
        if any(call.begun for call in self._calls.values() if call is not goes_on):
            raise Interrupted("the answer cannot continue: the remaining engines use other token ids; ask again")


def _full(noun: str, n_tokens: int, name: str, most: int) -> LimitReached:
    return LimitReached(Outcome.CONTEXT_FULL, f"{noun} has {n_tokens} tokens, and {name} of its limits is {most}")


def _check_size(engine: Engine, pending: _PendingRequest) -> None:
    """Raise LimitReached if the text, calls and tools of a request cannot fit into the engine's context."""
    context_tokens = engine.info.context_tokens
    limit = _MAX_CHARS if context_tokens is None else context_tokens * _MAX_CHARS_PER_TOKEN
    if pending.n_chars_at_most <= limit:
        return
    size = n_chars(pending.request.messages, pending.request.tools)
    if size > limit:
        context = "a context of unknown length" if context_tokens is None else f"a context of {context_tokens} tokens"
        raise LimitReached(
            Outcome.CONTEXT_FULL, f"engine {engine.address.url}: a prompt of {size} characters in {context}"
        )


def _dated(completion: Completion, version: str) -> Completion:
    """Return the completion with the version that the farm sent the engine, if the engine names none."""
    if completion.policy_version or completion.versions or not version:
        return completion
    sampled = completion.response_ids is not None
    spans = (VersionSpan(version, 0, completion.n_response_tokens),) if sampled else ()
    return replace(completion, policy_version=version, versions=spans)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread, as all rollouts share the event loop; wait for its end even when cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _named(error: EngineError, rollout_id: str) -> EngineError:
    """Return an error of the same kind whose message begins with the rollout's id."""
    if isinstance(error, ImageUnreadable):
        return ImageUnreadable(f"{rollout_id}: {error}", error.reason)
    named = next((kind for kind in _KEPT_KINDS if isinstance(error, kind)), EngineError)(f"{rollout_id}: {error}")
    named.retryable = error.retryable
    return named
