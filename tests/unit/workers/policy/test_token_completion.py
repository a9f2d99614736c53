"""One answer in one or several parts: the weights that sampled each part, its end, and the streamed text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from farm.errors import EngineError, LimitReached
from farm.records.engine import EngineInfo
from farm.records.experts.routed_experts import CallExperts
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, TokenIds, VersionSpan, token_ids
from farm.seeds import part_seed
from tests.unit.workers.policy.tokens.zoo import CHATML, user
from workers.plugins.interfaces import Completion, Delta
from workers.policy import tool_calls
from workers.policy.answer_form import FormedSampling
from workers.policy.generation import EngineAddress, EngineBusy, ExpertRange, Generation, OnIds
from workers.policy.token_completion import Interrupted, StreamForwarder, TokenCompletion
from workers.policy.tokens.session import TokenSession

TOKENIZER = CHATML.text().tokenizer
FULL = LimitReached(Outcome.CONTEXT_FULL, "the context is full")


def part(text: str, reason: str = "stop", **more: Any) -> Generation:
    ids = TOKENIZER.encode(text)
    return Generation(
        response_ids=ids, response_logprobs=np.full(len(ids), -1.0, np.float32), finish_reason=reason, **more
    )


class _Scripted:
    """An engine that returns parts, or raises; of a stream it sends the ids one by one before either."""

    def __init__(self, *script: Generation | Exception | tuple[Generation, Exception]) -> None:
        self.address = EngineAddress("http://e1/v1")
        self.info = EngineInfo(token_in="generate")
        self.requests: list[tuple[list[int], int]] = []
        self.seeds: list[int | None] = []
        self.least: list[int | None] = []
        self.vocabularies: set[int | None] = set()
        self.experts: list[ExpertRange | None] = []
        self._script: Iterator[Any] = iter(script)

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
        self.requests.append((prompt_ids.tolist(), max_tokens))
        self.seeds.append(sampling.seed)
        self.least.append(sampling.min_tokens)
        self.vocabularies.add(n_vocabulary)
        self.experts.append(experts)
        step = next(self._script)
        result, error = step if isinstance(step, tuple) else (step, None)
        if isinstance(result, Exception):
            raise result
        if on_ids is not None:
            for number in result.response_ids.tolist():
                on_ids([number])
        if error is not None:
            raise error
        generation: Generation = result
        return generation


class _Bench:
    """One call, from a conversation of one message."""

    def __init__(self, max_tokens: int = 1000, *, stop: Sequence[str] = (), live: bool = False, **more: Any) -> None:
        text, sampling = CHATML.text(), SamplingParams(stop=tuple(stop), **more)
        self.deltas: list[Delta] = []
        parser = tool_calls.parser("hermes")
        passed_on = StreamForwarder(text.tokenizer, parser, sampling.stop, self.deltas.append) if live else None
        prompt = TokenSession(text).prompt([user("begin")], [])
        self.prompt = prompt.ids.tolist()
        self.call = TokenCompletion(prompt, text.tokenizer, parser, sampling, max_tokens, passed_on)

    def run(self, engine: Any, notice: str = "") -> Completion:
        """Run the coroutine to its end, through all its waits."""

        async def main() -> None:
            while not self.call.ended:
                try:
                    await self.call.resume(engine, "", "r1", notice)
                except EngineBusy:
                    continue

        asyncio.run(main())
        parsed = self.call.parsed()
        return self.call.completion("e1", tool_calls.message(parsed), parsed.n_invalid)

    @property
    def passed_on(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def ids_of(completion: Completion) -> list[int]:
    assert completion.response_ids is not None
    result: list[int] = completion.response_ids.tolist()
    return result


def routed(text: str, start: int, n_before: int, value: int, reason: str = "stop") -> Generation:
    """A part whose experts are all of one number, from `start` on, for `n_before` ids and its own."""
    sampled = part(text, reason)
    n_rows = n_before + len(sampled.response_ids) - 1 - start
    return replace(sampled, routed_experts=CallExperts.of(start, np.full((n_rows, 2, 3), value, np.uint8)))


def test_experts_of_parts_are_contiguous_and_a_part_without_tokens_has_none() -> None:
    bench = _Bench(max_tokens=100, routed_experts=3)
    n = len(bench.prompt)
    nothing = part("", "abort")
    first = routed("one two", 0, n, 7, "abort")
    held = n + len(first.response_ids)
    engine = _Scripted(nothing, first, nothing, routed(" three<|im_end|>", held - 1, held, 9))
    completion = bench.run(engine)
    assert engine.experts == [ExpertRange(3, 0), ExpertRange(3, 0), *[ExpertRange(3, held - 1, 2)] * 2]
    experts = completion.routed_experts
    assert experts is not None
    assert experts.ids is not None
    assert (experts.start, experts.end) == (0, n + len(ids_of(completion)) - 1)
    assert experts.ids[:, 0, 0].tolist() == [7] * (held - 1) + [9] * (experts.end - held + 1)


def test_experts_dropped_for_a_guide_are_requested_again() -> None:
    bench = _Bench(max_tokens=100, routed_experts=3)
    n = len(bench.prompt)
    bench.call._sampling = FormedSampling(**bench.call._sampling.model_dump(), guide={"json_schema": {}})
    engine = _Scripted(routed("one", 0, n, 7, "abort"), routed("two<|im_end|>", 0, n, 9))
    completion = bench.run(engine)
    assert engine.experts == [ExpertRange(3, 0)] * 2
    assert completion.routed_experts is not None
    assert completion.routed_experts.ids is not None
    assert set(completion.routed_experts.ids.reshape(-1).tolist()) == {9}


def test_call_requests_no_experts_that_earlier_calls_had() -> None:
    session = TokenSession(CHATML.text())
    first = session.prompt([user("begin")], [])
    answer: Message = {"role": "assistant", "content": "one"}
    sampled = TOKENIZER.encode("one<|im_end|>")
    session.commit(first, sampled, answer)
    prompt = session.prompt([user("begin"), answer, user("go on")], [])
    sampling = SamplingParams(routed_experts=3)
    call = TokenCompletion(prompt, TOKENIZER, tool_calls.parser("hermes"), sampling, 100, None, 2)
    n_held = len(first.ids) + len(sampled)
    engine: Any = _Scripted(routed("two<|im_end|>", n_held - 1, len(prompt.ids), 9))
    asyncio.run(call.resume(engine, "", "r1", ""))
    assert engine.experts == [ExpertRange(3, n_held - 1, 2)]


def test_missing_rest_is_requested_from_all_ids_so_far() -> None:
    bench = _Bench(max_tokens=100)
    first, last = part("one two", "abort"), part(" three<|im_end|>")
    engine = _Scripted(first, last)
    completion = bench.run(engine)
    n = len(first.response_ids)
    assert engine.requests == [(bench.prompt, 100), (bench.prompt + first.response_ids.tolist(), 100 - n)]
    assert ids_of(completion) == first.response_ids.tolist() + last.response_ids.tolist()
    assert completion.response_logprobs is not None
    assert len(completion.response_logprobs) == completion.n_response_tokens
    assert completion.response["content"] == "one two three"


def test_every_request_has_the_vocabulary_size() -> None:
    engine = _Scripted(part("one two", "abort"), part(" three<|im_end|>"))
    _Bench().run(engine)
    assert engine.vocabularies == {TOKENIZER.size}


def test_abort_at_the_exact_limit_is_the_end() -> None:
    text = "one two three"
    n = len(TOKENIZER.encode(text))
    bench = _Bench(n, live=True)
    completion = bench.run(_Scripted(part(text, "abort")))
    assert completion.finish_reason == "length"
    assert bench.passed_on == text


def test_held_back_text_is_sent_at_an_end_by_length() -> None:
    text = "one <tool_"
    bench = _Bench(len(TOKENIZER.encode(text)), live=True)
    completion = bench.run(_Scripted(part(text, "abort")))
    assert completion.response["content"] == text
    assert bench.passed_on == text


def test_engine_without_room_for_a_continued_answer_ends_it() -> None:
    bench = _Bench()
    completion = bench.run(_Scripted(part("one two", "abort"), FULL))
    assert completion.finish_reason == "length"
    assert completion.response["content"] == "one two"


def test_context_that_is_full_before_the_first_token_is_a_limit() -> None:
    with pytest.raises(LimitReached):
        _Bench().run(_Scripted(FULL))


def test_weights_that_sampled_no_token_are_not_listed() -> None:
    nothing = part("", "abort", versions=(VersionSpan("7", 0, 0),))
    last = part("one two<|im_end|>", versions=(VersionSpan("8", 0, len(TOKENIZER.encode("one two<|im_end|>"))),))
    completion = _Bench().run(_Scripted(nothing, last))
    assert completion.policy_version == "8"
    assert completion.versions == (VersionSpan("8", 0, completion.n_response_tokens),)


def test_every_token_has_a_version_span_even_if_one_engine_does_not_report_it() -> None:
    first = part("one two", "abort", versions=(VersionSpan("7", 0, len(TOKENIZER.encode("one two"))),))
    completion = _Bench().run(_Scripted(first, part(" three")))
    n = len(first.response_ids)
    assert completion.versions == (VersionSpan("7", 0, n), VersionSpan("", n, completion.n_response_tokens))
    assert _Bench().run(_Scripted(part("one"))).versions == ()


def test_parts_with_the_same_weights_are_one_span() -> None:
    completion = _Bench().run(_Scripted(part("one two", "abort"), part(" three")), notice="7")
    assert completion.versions == (VersionSpan("7", 0, completion.n_response_tokens),)


def test_first_mismatch_over_all_parts_is_reported() -> None:
    bench = _Bench()
    seen = token_ids([*bench.prompt[:3], 1])
    later = part("one two", "abort", prompt_ids=token_ids([*bench.prompt, 5, 6]))
    completion = bench.run(_Scripted(later, part(" three", prompt_ids=seen)))
    assert completion.mismatch == 3


def test_engine_that_aborts_repeatedly_is_an_error() -> None:
    with pytest.raises(EngineError, match="aborted one answer 100 times"):
        _Bench().run(_Scripted(*[part("", "abort")] * 200))


def test_abort_pauses_the_engine_only_briefly() -> None:
    with pytest.raises(EngineBusy) as caught:
        asyncio.run(_Bench().call.resume(_Scripted(part("one", "abort")), "", "r1", ""))  # type: ignore[arg-type]
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s < 1


@pytest.mark.parametrize("error", [EngineError("the connection broke"), asyncio.CancelledError()])
def test_broken_stream_is_never_followed_by_another_answer(error: Any) -> None:
    bench = _Bench(live=True)
    engine = _Scripted((part("one two three"), error), part("another"))
    with pytest.raises(type(error)):
        bench.run(engine)
    begun = bench.passed_on
    assert begun
    with pytest.raises(Interrupted, match="ask again") as caught:
        bench.run(engine)
    assert caught.value.retryable
    assert bench.passed_on == begun


def test_aborted_stream_continues() -> None:
    bench = _Bench(live=True)
    completion = bench.run(_Scripted(part("one two", "abort"), EngineBusy("wait"), part(" three<|im_end|>")))
    assert bench.passed_on == completion.response["content"] == "one two three"


@pytest.mark.parametrize("live", [True, False])
def test_message_ends_before_the_stop_string_in_its_ids(live: bool) -> None:
    bench = _Bench(stop=["\nObservation:"], live=live)
    completion = bench.run(_Scripted(part("I look.\nObservation:", stop_reason="\nObservation:")))
    assert completion.response["content"] == "I look."
    assert TOKENIZER.decode(ids_of(completion)) == "I look.\nObservation:"
    assert bench.passed_on == ("I look." if live else "")


def test_continuation_after_an_abort_uses_a_new_seed() -> None:
    nothing, first = part("", "abort"), part("one two", "abort")
    engine = _Scripted(nothing, first, part(" three<|im_end|>"))
    _Bench(seed=5).run(engine)
    assert engine.seeds == [5, 5, part_seed(5, len(first.response_ids))]


def test_min_tokens_include_those_before_an_abort() -> None:
    first = part("one two", "abort")
    n = len(first.response_ids)
    for least in (n + 5, n - 1):
        engine = _Scripted(first, part(" three<|im_end|>"))
        _Bench(min_tokens=least).run(engine)
        assert engine.least == [least, max(0, least - n)]
        assert engine.seeds == [None, None]
