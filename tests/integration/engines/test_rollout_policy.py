"""The policy of one rollout, over real HTTP against the scripted engine: exact ids, aborts, failover, stale weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.errors import EngineError, LimitReached, StaleRollout
from farm.records.engine_state import StoredEngine
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall, TokenIds, VersionSpan, segments
from tests.doubles import EngineDouble
from workers.plugins.interfaces import Completion, Delta
from workers.policy.answer_form import FormedSampling
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress, FormUnsupported
from workers.policy.policy import PromptRules, RolloutPolicy
from workers.policy.recording import Stopwatch, as_applied, model_call
from workers.policy.routing.backend import address_of, record_of
from workers.policy.routing.model_texts import tool_format_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.policy.tokens import tokenizer
from workers.testing.engine.model_text import write_model_text
from workers.testing.serving import serving

SAMPLING = SamplingParams(temperature=1.0, seed=3)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
_DEADLINE_S = 60.0


class _Bench:
    """Running doubles, a pool on them, and the policy of one rollout."""

    def __init__(self, doubles: Sequence[EngineDouble], urls: Sequence[str]) -> None:
        self.doubles = doubles
        self.urls = urls
        self.listed: list[StoredEngine] = []
        self.calls: list[ModelCall] = []
        self.pool = EnginePool(lambda: tuple(self.listed), check_s=0.2)

    def policy(self, rules: PromptRules | None = None) -> RolloutPolicy:
        return RolloutPolicy(StickyRouter(self.pool, RoutingKey("r1", "g1")), "r1", rules=rules)

    async def ask(
        self, policy: RolloutPolicy, messages: Sequence[Message], max_tokens: int = 64, **more: Any
    ) -> Completion:
        watch = Stopwatch()
        async with asyncio.timeout(_DEADLINE_S):
            completion = await policy.complete(messages, TOOLS, more.pop("sampling", SAMPLING), max_tokens, **more)
        applied = as_applied(SAMPLING, max_tokens)
        self.calls.append(model_call(len(self.calls), messages, completion, watch, applied, TOOLS))
        return completion

    def order(self, **changes: Any) -> None:
        """Change the farm's record of the first engine."""
        old = self.listed[0]
        self.listed[0] = replace(record_of(address_of(old), old.info), **changes)
        self.pool.changed()


@contextmanager
def served(*doubles: EngineDouble) -> Iterator[list[str]]:
    if not doubles:
        yield []
        return
    with serving(doubles[0].app()) as url, served(*doubles[1:]) as urls:
        yield [url, *urls]


def run(test: Callable[[_Bench], Coroutine[Any, Any, None]], *doubles: EngineDouble) -> None:
    async def main(bench: _Bench) -> None:
        for url in bench.urls:
            address = EngineAddress(f"{url}/v1")
            bench.listed.append(record_of(address, await detect(address)))
        try:
            await test(bench)
        finally:
            await bench.pool.aclose()

    with served(*doubles) as urls:
        asyncio.run(main(_Bench(doubles, urls)))


async def wait_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - it is the state of a server
            await asyncio.sleep(0.005)


def next_messages(completion: Completion, turn: int) -> list[Message]:
    """Return the completion, and results for its calls or a user's message."""
    calls = completion.response.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"} for call in calls]
    return [completion.response, *(results or [{"role": "user", "content": f"go on, {turn}"}])]


def all_ids(completion: Completion) -> TokenIds:
    assert completion.prompt_ids is not None
    assert completion.response_ids is not None
    return np.concatenate([completion.prompt_ids, completion.response_ids])


USER: Message = {"role": "user", "content": "Look around and tell me what you see."}


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
def test_prompt_is_the_previous_ids_and_the_new_messages(wire: Any, scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        policy, messages = bench.policy(), [USER]
        held: TokenIds | None = None
        retokenised = 0
        encoder = tokenizer.load(str(bench.doubles[0].root)).tokenizer
        for turn in range(20):
            completion = await bench.ask(policy, messages)
            assert completion.mismatch is None
            assert completion.prompt_ids is not None
            assert completion.begins == ("" if turn else "first")
            if held is not None:
                assert np.array_equal(completion.prompt_ids[: len(held)], held)
            held = all_ids(completion)
            again = encoder.encode(encoder.decode(held))
            retokenised += len(again) == len(held) and bool(np.array_equal(again, held))
            messages = [*messages, *next_messages(completion, turn)]
        [row] = segments(bench.calls)
        assert held is not None
        assert np.array_equal(np.concatenate([row.prompt_ids, row.response_ids]), held)
        assert row.response_mask.sum() == sum(call.n_response_tokens for call in bench.calls)
        # text sampled by random weights does not encode to the same ids: else this test proves nothing
        assert retokenised < 20

    run(main, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=20))


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
def test_answer_is_constrained_to_its_schema_if_the_engine_supports_it(wire: Any, scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        free = await bench.ask(policy, [USER])
        assert free.labels == {}
        held = FormedSampling(answer_schema={"type": "object"}, required=True)
        assert (await bench.ask(policy, [USER], sampling=held)).labels == {"guided": "yes"}
        must_call = FormedSampling(tool_choice="required", required=True)
        assert (await bench.ask(policy, [USER], sampling=must_call)).labels == {"guided": "yes"}

    run(main, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=10))


def test_unsupported_schema_is_refused_only_if_required() -> None:
    async def main(bench: _Bench) -> None:
        # the engine's wire is vLLM's, and no other is known
        [engine] = bench.listed
        assert engine.info is not None
        bench.listed[0] = replace(engine, info=engine.info.model_copy(update={"kind": "openai"}))
        bench.pool.changed()
        policy, form = bench.policy(), {"answer_schema": {"type": "object"}}
        assert (await bench.ask(policy, [USER], sampling=FormedSampling.model_validate(form))).labels == {}
        with pytest.raises(FormUnsupported, match=r"^r1: "):
            await bench.ask(policy, [USER], sampling=FormedSampling.model_validate({**form, "required": True}))

    run(main, EngineDouble(scale_out=False, mean_tokens=10))


class _GrammarRefusal:
    """An engine that refuses every grammar, as it does for a schema that it does not support."""

    def __init__(self, app: ASGIApp, status: int) -> None:
        self._app, self._status = app, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        if any(word in body for word in (b"structured_outputs", b"json_schema", b"structural_tag")):
            problem = {"error": {"message": "Grammar error: Invalid type: bogus"}}
            await JSONResponse(problem, self._status)(scope, receive, send)
            return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return next(whole, None) or await receive()

        await self._app(scope, again, send)


class _EngineWithoutGrammar(EngineDouble):
    refused_by = 400

    def app(self) -> Starlette:
        app = super().app()
        app.add_middleware(_GrammarRefusal, status=self.refused_by)
        return app


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
@pytest.mark.parametrize("status", [400, 500])
def test_schema_refused_by_the_engine_is_ignored_unless_required(wire: Any, scale_out: bool, status: int) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        for form in ({"answer_schema": {"type": "bogus"}}, {"tool_choice": "required"}):
            free = await bench.ask(policy, [USER], sampling=FormedSampling.model_validate(form))
            assert free.labels == {}
            assert free.n_response_tokens
            with pytest.raises(FormUnsupported, match=r"^r1: .*Grammar error: Invalid type: bogus"):
                await bench.ask(policy, [USER], sampling=FormedSampling.model_validate({**form, "required": True}))

    double = _EngineWithoutGrammar(wire=wire, scale_out=scale_out, mean_tokens=10)
    double.refused_by = status
    run(main, double)


def test_text_is_not_parsed_as_a_call_if_tools_are_disabled() -> None:
    async def main(bench: _Bench) -> None:
        called = 0
        for sampling in (SAMPLING, FormedSampling(tool_choice="none", seed=3)):
            policy, messages = bench.policy(), [USER]
            for turn in range(20):
                completion = await bench.ask(policy, messages, sampling=sampling)
                messages = [*messages, *next_messages(completion, turn)]
                called += len(completion.response.get("tool_calls") or [])
                if sampling is not SAMPLING:
                    assert "tool_calls" not in completion.response
                    assert completion.begins == ("" if turn else "first")
        assert called, "else this test proves nothing"

    run(main, EngineDouble(mean_tokens=20))


def test_branched_conversations_share_their_common_prefix() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        first = await bench.ask(policy, [USER])
        one, other = next_messages(first, 1), next_messages(first, 2)
        left = await bench.ask(policy, [USER, *one])
        right = await bench.ask(policy, [USER, *other])
        compacted = await bench.ask(policy, [{"role": "user", "content": "In short: all is well. Go on."}])
        assert left.prompt_ids is not None
        assert right.prompt_ids is not None
        for branch in (left.prompt_ids, right.prompt_ids):
            assert np.array_equal(branch[: len(all_ids(first))], all_ids(first))
        assert compacted.begins.startswith("branch")
        rows = segments(bench.calls)
        assert len(rows) == 3
        assert sum(int(row.response_mask.sum()) for row in rows) == sum(c.n_response_tokens for c in bench.calls)

    run(main, EngineDouble(mean_tokens=20))


def test_truncated_turn_gets_an_unsampled_end_token() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        cut = await bench.ask(policy, [USER], max_tokens=4)
        assert cut.finish_reason == "length"
        await bench.ask(policy, [USER, *next_messages(cut, 0)])
        [row] = segments(bench.calls)
        end = tokenizer.load(str(bench.doubles[0].root)).tokenizer.end_ids
        assert list(row.response_mask[:5]) == [1, 1, 1, 1, 0]
        assert int(row.response_ids[4]) in end

    run(main, EngineDouble(mean_tokens=500))


def test_aborted_answer_continues_under_the_new_weights() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        result = asyncio.ensure_future(bench.ask(policy, [USER], max_tokens=120))
        await give_new_weights(bench)
        completion = await result
        assert completion.response_ids is not None
        assert [span.version for span in completion.versions] == ["7", "8"]
        first, second = completion.versions
        assert (first.start, first.end, second.end) == (0, second.start, len(completion.response_ids))
        assert completion.policy_version == "7"
        [row] = segments(bench.calls)
        assert list(np.unique(row.policy_versions)) == [7, 8]
        assert np.array_equal(row.response_ids, completion.response_ids)

    run(main, EngineDouble(mean_tokens=5_000, tokens_per_s=40, weight_version="7"))


async def give_new_weights(bench: _Bench) -> None:
    """Abort the running samples of the only engine, and let it continue with weights `8`."""
    [double] = bench.doubles
    await wait_until(lambda: double.n_tokens >= 5)
    await pause(bench, "abort")
    bench.order(paused="abort", n_orders=1, n_done=1, engine_paused="abort", version="7", engine_version="7")
    await wait_until(lambda: double.n_running == 0)
    await post(bench, "/update_weight_version", {"new_version": "8"})
    await post(bench, "/resume")
    bench.order(n_orders=2, n_done=2, version="8", engine_version="8")


async def pause(bench: _Bench, mode: str) -> None:
    await post(bench, f"/pause?mode={mode}")


async def post(bench: _Bench, path: str, body: Any = None) -> None:
    async with httpx2.AsyncClient() as client:
        (await client.post(bench.urls[0] + path, json=body)).raise_for_status()


def test_stream_deltas_equal_the_answer() -> None:
    async def main(bench: _Bench) -> None:
        policy, messages, n_pieces = bench.policy(), [USER], 0
        for turn in range(8):
            pieces: list[Delta] = []
            completion = await bench.ask(policy, messages, on_delta=pieces.append)
            text = "".join(piece.text for piece in pieces if not piece.reasoning)
            thought = "".join(piece.text for piece in pieces if piece.reasoning)
            assert text == completion.response["content"]
            assert thought == completion.response.get("reasoning_content", "")
            n_pieces += len(pieces)
            messages = [*messages, *next_messages(completion, turn)]
        assert n_pieces > 8

    run(main, EngineDouble(mean_tokens=20))


def test_stream_on_a_failed_engine_is_a_retryable_error() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        pieces: list[Delta] = []
        result = asyncio.ensure_future(bench.ask(policy, [USER], max_tokens=5_000, on_delta=pieces.append))
        await wait_until(lambda: pieces)
        [backend] = [place for place in bench.pool.backends if place.in_flight]
        backend.abort_calls("is out: it died", died=True)
        with pytest.raises(EngineError, match=r"r1: .* broke off .* ask again") as caught:
            await result
        assert caught.value.retryable
        # nothing of it is kept: a retry is a new call
        again = await bench.ask(policy, [USER], max_tokens=8, on_delta=pieces.append)
        assert again.begins == "first"

    run(main, *(EngineDouble(mean_tokens=5_000, tokens_per_s=200) for _ in range(2)))


def test_stream_ends_with_an_error_if_the_tokenizer_changes(tmp_path: Path) -> None:
    async def main(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy()
        pieces: list[Delta] = []
        result = asyncio.ensure_future(bench.ask(policy, [USER], max_tokens=400, on_delta=pieces.append))
        await wait_until(lambda: pieces)
        change_tokenizer(bench, tmp_path)
        await pause(bench, "abort")
        await wait_until(lambda: double.n_running == 0)
        await post(bench, "/resume")
        with pytest.raises(EngineError, match=r"r1: .* other token ids; ask again"):
            await result

    run(main, EngineDouble(mean_tokens=5_000, tokens_per_s=200))


def test_calls_after_a_tokenizer_change_begin_a_branch(tmp_path: Path) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        first = await bench.ask(policy, [USER])
        messages = [USER, *next_messages(first, 0)]
        change_tokenizer(bench, tmp_path)
        second = await bench.ask(policy, messages)
        third = await bench.ask(policy, [*messages, *next_messages(second, 1)])
        assert [first.begins, second.begins[:7], third.begins] == ["first", "branch:", ""]
        assert "other token ids" in second.begins

    run(main, EngineDouble(mean_tokens=20))


def change_tokenizer(bench: _Bench, folder: Path) -> None:
    """Change the engine's record to the tokenizer files in `folder`, which differ."""
    shutil.copytree(bench.doubles[0].root, folder, dirs_exist_ok=True)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    [known] = bench.listed
    bench.listed[0] = replace(known, tokenizer=str(folder))
    bench.pool.changed()


def test_prompt_mismatch_makes_the_row_untrainable() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        bench.doubles[0].fail_next("echo")
        completion = await bench.ask(policy, [USER])
        assert completion.mismatch is not None
        [row] = segments(bench.calls)
        assert not row.trainable
        assert row.mismatch == completion.mismatch

    run(main, EngineDouble())


@pytest.mark.parametrize("kind", ["500", "502", "429", "503", "close", "reset", "lengths", "garbage"])
def test_engine_fault_is_hidden_from_the_rollout(kind: str) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        before = await bench.ask(policy, [USER])
        messages = [USER, *next_messages(before, 0)]
        for double in bench.doubles:
            double.fail_next(kind)
        completion = await bench.ask(policy, messages)
        assert completion.prompt_ids is not None
        assert np.array_equal(completion.prompt_ids[: len(all_ids(before))], all_ids(before))
        assert completion.mismatch is None

    run(main, EngineDouble(retry_after_s=0.2), EngineDouble(retry_after_s=0.2))


def test_request_refused_by_every_engine_names_the_rollout() -> None:
    async def main(bench: _Bench) -> None:
        bench.doubles[0].faults.set_rates({"garbage": 1.0})
        with pytest.raises(EngineError, match="r1: ") as caught:
            await bench.ask(bench.policy(), [USER])
        assert bench.urls[0] in str(caught.value)

    run(main, EngineDouble())


def test_engine_with_an_unknown_tool_format_is_skipped() -> None:
    async def main(bench: _Bench) -> None:
        good, wrong = bench.listed
        bench.listed[1] = replace(wrong, tool_format="nonsense")
        for number in range(8):
            router = StickyRouter(bench.pool, RoutingKey(f"r{number}", f"g{number}"))
            completion = await bench.ask(RolloutPolicy(router, f"r{number}"), [USER])
            assert completion.engine == good.url
        bench.listed.pop(0)
        with pytest.raises(EngineError, match="unknown tool format 'nonsense': use one of hermes"):
            await bench.ask(bench.policy(), [USER])

    run(main, EngineDouble(), EngineDouble())


def test_tools_are_refused_if_the_tool_format_is_unknown(tmp_path: Path) -> None:
    """Its calls would be taken for the answer; a configured tool format tells them apart."""
    write_model_text(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<tool_call>", "<call>"))

    async def main(bench: _Bench) -> None:
        [engine] = bench.listed
        assert engine.info is not None
        engine = replace(engine, tokenizer=str(tmp_path))
        assert engine.info is not None
        assert await tool_format_of(address_of(engine), engine.info) == "none"
        bench.listed[0] = engine
        with pytest.raises(EngineError, match=r"r1: .*no supported format of calls"):
            await bench.ask(bench.policy(), [USER])
        await bench.ask(bench.policy(), [USER], sampling=FormedSampling(tool_choice="none"))
        for tool_format in ("none", "hermes"):
            bench.listed[0] = replace(engine, tool_format=tool_format)
            await bench.ask(bench.policy(), [USER])

    run(main, EngineDouble())


def test_busy_engines_are_named_while_a_call_waits() -> None:
    async def main(bench: _Bench) -> None:
        bench.doubles[0].faults.set_rates({"429": 1.0})
        policy = bench.policy()
        result = asyncio.ensure_future(bench.ask(policy, [USER]))
        await wait_until(lambda: "busy" in policy.blocked)
        assert bench.urls[0] in policy.blocked
        bench.doubles[0].faults.clear()
        await result
        assert policy.blocked == ""

    run(main, EngineDouble(retry_after_s=0.3))


def test_full_context_is_a_limit() -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        with pytest.raises(LimitReached) as caught:
            await bench.ask(policy, [{"role": "user", "content": "word " * 2000}])
        assert caught.value.outcome is Outcome.CONTEXT_FULL

    run(main, EngineDouble(context_tokens=900))


def limited_to(name: str, most: int) -> PromptRules:
    values: dict[str, Any] = {name: most}
    return PromptRules(**values)


@pytest.mark.parametrize("name", ["max_row_tokens", "max_response_tokens"])
def test_full_row_is_a_limit(name: str) -> None:
    async def main(bench: _Bench) -> None:
        first = await bench.ask(bench.policy(), [USER])
        n_prompt, n_sampled = first.n_prompt_tokens, first.n_response_tokens
        most = n_sampled + (n_prompt if name == "max_row_tokens" else 0)
        # one token less, and the answer is cut there
        policy = bench.policy(limited_to(name, most - 1))
        cut = await bench.ask(policy, [USER])
        assert (cut.finish_reason, cut.n_response_tokens) == ("length", n_sampled - 1)
        # with the tools' results, the row exceeds its limit
        policy = bench.policy(limited_to(name, most + 5))
        whole = await bench.ask(policy, [USER])
        assert whole.response_ids is not None
        assert first.response_ids is not None
        assert whole.response_ids.tolist() == first.response_ids.tolist()
        with pytest.raises(LimitReached, match=rf"row has \d+ tokens, and {name} of its limits is {most + 5}") as full:
            await bench.ask(policy, [USER, whole.response, {"role": "user", "content": "word " * 20}])
        assert full.value.outcome is Outcome.CONTEXT_FULL
        assert policy.context_tokens == (most + 5 if name == "max_row_tokens" else 8192)
        # a prompt that begins a row of its own has the whole limit of responses
        if name == "max_response_tokens":
            again = await bench.ask(policy, [{"role": "user", "content": "word " * 20}])
            assert again.n_response_tokens
        # for a call's prompt the total counts, and no answer is cut
        policy = bench.policy(PromptRules(max_prompt_tokens=n_prompt))
        assert (await bench.ask(policy, [USER])).n_response_tokens == n_sampled
        with pytest.raises(LimitReached, match=rf"the prompt has \d+ tokens, and max_prompt_tokens .* is {n_prompt}$"):
            await bench.ask(policy, [USER, whole.response, {"role": "user", "content": "word"}])

    run(main, EngineDouble(context_tokens=8192))


def test_oversized_prompt_is_a_limit_before_encoding() -> None:
    async def main(bench: _Bench) -> None:
        with pytest.raises(LimitReached, match=r"a prompt of 15000\d{3} characters in a context of 100000") as limit:
            await bench.ask(bench.policy(), [{"role": "user", "content": "word " * 3_000_000}])
        assert limit.value.outcome is Outcome.CONTEXT_FULL

    run(main, EngineDouble(context_tokens=100_000))


@pytest.mark.parametrize("restart", [True, False])
def test_rollout_that_exceeds_max_staleness_is_stale(restart: bool) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy(PromptRules(max_staleness=1, restart_stale=restart))
        first = await bench.ask(policy, [USER])
        assert first.versions == (VersionSpan("3", 0, first.n_response_tokens),)
        bench.order(version="4", engine_version="4")
        second = await bench.ask(policy, [USER, *next_messages(first, 0)])
        bench.order(version="5", engine_version="5")
        with pytest.raises(StaleRollout, match="max_staleness 1") as caught:
            await bench.ask(policy, [USER, *next_messages(first, 0), *next_messages(second, 1)])
        assert caught.value.restart is restart

    run(main, EngineDouble(weight_version="3"))


def test_new_weights_during_the_last_call_make_the_rollout_stale() -> None:
    async def main(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy(PromptRules(max_staleness=0))
        result = asyncio.ensure_future(bench.ask(policy, [USER]))
        await wait_until(lambda: double.n_running)
        bench.order(version="4", engine_version="4")
        with pytest.raises(StaleRollout, match="weights 4"):
            await result

    run(main, EngineDouble(weight_version="3", mean_tokens=40, tokens_per_s=100))


def test_new_weights_during_a_pause_are_detected_before_sampling() -> None:
    async def main(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy(PromptRules(max_staleness=0))
        first = await bench.ask(policy, [USER])
        n_tokens = double.n_tokens
        bench.order(paused="drain", version="3", engine_version="3")
        result = asyncio.ensure_future(bench.ask(policy, [USER, *next_messages(first, 0)]))
        await wait_until(lambda: policy.paused_s > 0)
        bench.order(version="4", engine_version="4")
        with pytest.raises(StaleRollout, match="weights 4"):
            await result
        assert double.n_tokens == n_tokens

    run(main, EngineDouble(weight_version="3"))


@pytest.mark.parametrize("wire", ["vllm", "openai"])
def test_chat_engine_without_a_version_gets_the_farm_version(wire: Any) -> None:
    async def main(bench: _Bench) -> None:
        [known] = bench.listed
        assert known.info is not None
        bench.listed[0] = replace(known, info=known.info.model_copy(update={"token_in": ""}))
        bench.order(version="4", engine_version="4")
        policy = bench.policy(PromptRules(max_staleness=1))
        completion = await bench.ask(policy, [USER])
        assert completion.policy_version == "4"
        exact = completion.response_ids is not None
        assert exact is (wire == "vllm")
        assert completion.versions == ((VersionSpan("4", 0, completion.n_response_tokens),) if exact else ())
        bench.order(version="6", engine_version="6")
        with pytest.raises(StaleRollout, match="max_staleness 1"):
            await bench.ask(policy, [USER, *next_messages(completion, 0)])

    run(main, EngineDouble(wire=wire, version="0.32.0"))


def test_engine_without_a_version_gets_the_farm_version() -> None:
    async def main(bench: _Bench) -> None:
        bench.order(version="4", engine_version="4")
        completion = await bench.ask(bench.policy(), [USER])
        assert completion.versions == (VersionSpan("4", 0, completion.n_response_tokens),)

    run(main, EngineDouble(version="0.32.0", scale_out=False))


def test_event_loop_is_not_blocked_while_a_long_text_is_encoded() -> None:
    """Another text of the same rollout waits for its turn."""

    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        long: Message = {"role": "user", "content": "A long text, of which no token is sampled. " * 10_000}
        result = asyncio.ensure_future(bench.ask(policy, [long]))
        n_turns = 0
        while not result.done():
            await asyncio.sleep(0)
            n_turns += 1
        completion = await result
        assert completion.n_prompt_tokens > 50_000
        assert n_turns > 100
        both = await asyncio.gather(*[bench.ask(policy, [long, *next_messages(completion, turn)]) for turn in range(4)])
        for each in both:
            assert each.prompt_ids is not None
            assert np.array_equal(each.prompt_ids[: len(all_ids(completion))], all_ids(completion))

    run(main, EngineDouble(mean_tokens=20))


def test_text_only_engine_is_used_and_yields_no_rows() -> None:
    async def main(bench: _Bench) -> None:
        policy, messages = bench.policy(), [USER]
        for turn in range(3):
            completion = await bench.ask(policy, messages)
            assert completion.response_ids is None
            messages = [*messages, *next_messages(completion, turn)]
        assert segments(bench.calls) == ()

    run(main, EngineDouble(wire="openai"))
