"""The policy of one rollout: messages in, a completion out, with the ids that were sampled and nothing else.

On an engine that takes token ids, the prompt is the ids of the turns before and the new suffix; on any other, the
engine renders the messages itself, and the call is as exact as its answer. An answer that a weight update cut short is
taken up again from the ids sampled so far, so that one call may span several versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from farm.errors import EngineError, InvalidRequest, StaleRollout
from farm.request import SamplingParams
from farm.trajectory import NO_VERSION, Message, VersionSpan, version_number
from workers.interfaces import Completion, OnDelta
from workers.policy import parsing
from workers.policy.exact import ExactCall
from workers.policy.generation import Engine, EngineAddress, EngineRefused, EngineUnfit
from workers.policy.live import Interrupted, Live
from workers.policy.pool import Seat
from workers.policy.tokens import tokenizer
from workers.policy.tokens.session import FIRST, Prompt, TokenSession
from workers.policy.tokens.template import TemplateError
from workers.policy.tokens.tokenizer import ModelText, TokenizerMissing

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHARS_PER_TOKEN = 4
_ANSWER_TOKENS = 256
"""What an answer is taken to be long, for the sharing of load, before a rollout has had one."""

_LONG_CHARS = 100_000
"""A text that takes tens of milliseconds to encode."""

_TAIL_IDS = 16
"""The end of a prompt, in which a reasoning tag may be open."""

_MOVED = "branch: the calls before were made on engines that read other token ids"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a batch says of how its rollouts are prompted, and how old their weights may be."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_rewritten: bool = False
    max_staleness: int | None = None
    restart_stale: bool = False


class RolloutPolicy:
    """Plays one rollout on the engines that its seat finds. Several conversations may share it, at the same time."""

    def __init__(self, seat: Seat, rollout_id: str, model: str = "", rules: Rules | None = None) -> None:
        self._seat = seat
        self._rollout_id = rollout_id
        self._model = model
        self._rules = rules or Rules()
        self._texts: dict[EngineAddress, ModelText | None] = {}
        self._sessions: dict[str, TokenSession] = {}
        self._turn = asyncio.Lock()
        self._oldest: int | None = None
        self._n_calls = 0
        self._n_sampled = 0

    @property
    def blocked(self) -> str:
        return self._seat.blocked

    @property
    def paused_s(self) -> float:
        return self._seat.paused_s

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """As Policy says. Raises StaleRollout when newer weights have overtaken the rollout."""
        asked = _Asked(messages, tools, sampling, max_tokens, on_delta)
        try:
            completion = await self._seat.call(self._load(messages), lambda engine: self._ask(engine, asked))
        except EngineError as error:
            raise _named(error, self._rollout_id) from error
        self._n_calls += 1
        self._n_sampled += completion.n_response_tokens
        self._remember(completion)
        return completion

    async def _ask(self, engine: Engine, asked: _Asked) -> Completion:
        self._check_age(self._seat.newest_version)
        # an engine that names no weights is taken at the farm's word, at the oldest where that changed under way
        told = self._seat.version_of(engine.address.url)
        text = await self._text(engine) if engine.info.token_in else None
        if text is not None:
            return await self._exact(engine, text, asked, told)
        return await asked.chat(engine, self._model, self._rollout_id, self._rules, told)

    async def _text(self, engine: Engine) -> ModelText | None:
        if engine.address not in self._texts:
            self._texts[engine.address] = await _model_text(engine)
        return self._texts[engine.address]

    async def _exact(self, engine: Engine, text: ModelText, asked: _Asked, told: str) -> Completion:
        session = self._session(text)
        try:
            async with self._turn:
                begin = partial(asked.call_on, engine, text, session, moved=self._n_calls > 0)
                call = begin() if self._new_chars(asked.messages) < _LONG_CHARS else await _in_thread(begin)
        except TemplateError as error:
            raise EngineRefused(f"engine {engine.address.url}: {error}") from error
        except InvalidRequest as error:
            raise EngineUnfit(f"engine {engine.address.url}: {error}") from error
        while not call.ended:
            await call.go_on(engine, self._model, self._rollout_id, told)
        parsed = call.parsed()
        message = parsing.message(parsed)
        async with self._turn:
            session.took(call.prompt, call.response_ids, message)
        return call.completion(engine.address.url, message, parsed.n_invalid)

    def _session(self, text: ModelText) -> TokenSession:
        """One for each kind of tokenizer: ids of one mean nothing to another."""
        if text.name not in self._sessions:
            self._sessions[text.name] = TokenSession(
                text, template_kwargs=self._rules.template_kwargs, keep_rewritten=self._rules.keep_rewritten
            )
        return self._sessions[text.name]

    def _load(self, messages: Sequence[Message]) -> int:
        """About how many tokens a call is worth to an engine: what is new in its prompt, and the answer."""
        answer = self._n_sampled // self._n_calls if self._n_calls else _ANSWER_TOKENS
        return self._new_chars(messages) // _CHARS_PER_TOKEN + answer + 1

    def _new_chars(self, messages: Sequence[Message]) -> int:
        """About how long the text is that no earlier call had."""
        new = messages if self._n_calls == 0 else messages[-1:]
        return sum(len(str(message.get("content") or "")) for message in new)

    def _remember(self, completion: Completion) -> None:
        """Weights that are newer by now than the batch allows are found here, too: this call may be the last."""
        versions = [span.version for span in completion.versions] or [completion.policy_version]
        known = [number for number in map(version_number, versions) if number != NO_VERSION]
        if known:
            self._oldest = min(known) if self._oldest is None else min(self._oldest, *known)
            self._check_age(str(max(known)))
        self._check_age(self._seat.newest_version)

    def _check_age(self, newest: str) -> None:
        allowed, now = self._rules.max_staleness, version_number(newest)
        if allowed is None or self._oldest is None or now - self._oldest <= allowed:
            return
        raise StaleRollout(
            f"{self._rollout_id}: weights {now} have overtaken it: it began with {self._oldest}, and its batch allows "
            f"max_staleness {allowed}",
            restart=self._rules.restart_stale,
        )


class _Asked:
    """One request, and how far it has come; it lives on when another engine takes over."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None,
    ) -> None:
        self.messages = messages
        self.tools = tools
        self.sampling = sampling
        self.max_tokens = max_tokens
        self._on_delta = on_delta
        self._calls: dict[str, ExactCall] = {}

    def call_on(self, engine: Engine, text: ModelText, session: TokenSession, moved: bool) -> ExactCall:
        """The answer in ids of this tokenizer; `moved`: earlier calls were made in those of another, or without."""
        if text.name not in self._calls:
            prompt = session.prompt(self.messages, self.tools)
            if moved and prompt.begins == FIRST:
                prompt = replace(prompt, begins=_MOVED)
            self._calls[text.name] = self._new_call(engine, text, prompt)
        call = self._calls[text.name]
        self._check_begun(call)
        return call

    def _new_call(self, engine: Engine, text: ModelText, prompt: Prompt) -> ExactCall:
        opened = parsing.opens_reasoning(text.tokenizer.decode(prompt.ids[-_TAIL_IDS:]))
        parser = parsing.parser(
            engine.address.tool_format, template=text.template.source, opened=opened, tools=self.tools
        )
        live = None
        if self._on_delta is not None:
            live = Live(text.tokenizer, parser, self.sampling.stop, self._on_delta)
        return ExactCall(prompt, text.tokenizer, parser, self.sampling, self.max_tokens, live)

    async def chat(self, engine: Engine, model: str, session_id: str, rules: Rules, told: str) -> Completion:
        """The answer of an engine that renders and tokenises the messages itself; passed on in one piece."""
        self._check_begun(None)
        completion = await engine.chat(
            self.messages,
            self.tools,
            self.sampling,
            self.max_tokens,
            model=model,
            session_id=session_id,
            template_kwargs=rules.template_kwargs,
        )
        if self._on_delta is not None:
            for delta in parsing.deltas(completion.message):
                self._on_delta(delta)
        return _dated(completion, told)

    def _check_begun(self, goes_on: ExactCall | None) -> None:
        """Raise Interrupted if the beginning of another answer was passed on."""
        if any(call.begun for call in self._calls.values() if call is not goes_on):
            raise Interrupted("the answer cannot go on: the engines that are left read other token ids; ask again")


def _dated(completion: Completion, told: str) -> Completion:
    """With the weights that the farm told the engine it has, where it names none."""
    if completion.policy_version or completion.versions or not told:
        return completion
    sampled = completion.response_ids is not None
    spans = (VersionSpan(told, 0, completion.n_response_tokens),) if sampled else ()
    return replace(completion, policy_version=told, versions=spans)


async def _in_thread(work: Callable[[], T]) -> T:
    """Wait for it off the event loop, which is that of all rollouts; to its end, even when cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _model_text(engine: Engine) -> ModelText | None:
    """What the engine's model is written with; None if its files are not to be had here."""
    address, info = engine.address, engine.info
    for name in dict.fromkeys((address.tokenizer, info.root, address.model, info.model)):
        if name:
            try:
                return await asyncio.to_thread(tokenizer.load, name)
            except (TokenizerMissing, TemplateError) as missing:
                log.debug("engine %s: %s", address.url, missing)
    return None


def _named(error: EngineError, rollout_id: str) -> EngineError:
    """The same kind of error, its message beginning with the rollout's id."""
    named = EngineError(f"{rollout_id}: {error}")
    named.retryable = error.retryable
    return named
