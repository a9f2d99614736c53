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
from workers.policy.routing.engine_view import EngineRecord
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
        self.listed: list[EngineRecord] = []
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
        self.listed[0] = EngineRecord(old.address, old.info, **changes)
        self.pool.changed()


@contextmanager
def served(*doubles: EngineDouble) -> Iterator[list[str]]:
    if not doubles:
        yield []
        return
    with serving(doubles[0].app()) as url, served(*doubles[1:]) as urls:
        yield [url, *urls]


def run(play: Callable[[_Bench], Coroutine[Any, Any, None]], *doubles: EngineDouble) -> None:
    async def main(bench: _Bench) -> None:
        for url in bench.urls:
            address = EngineAddress(f"{url}/v1")
            bench.listed.append(EngineRecord(address, await detect(address)))
        try:
            await play(bench)
        finally:
            await bench.pool.aclose()

    with served(*doubles) as urls:
        asyncio.run(main(_Bench(doubles, urls)))


async def when(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - it is the state of a server
            await asyncio.sleep(0.005)


def answered(completion: Completion, turn: int) -> list[Message]:
    """Return the completion, and results for its calls or a user's message."""
    calls = completion.response.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"} for call in calls]
    return [completion.response, *(results or [{"role": "user", "content": f"go on, {turn}"}])]


def whole(completion: Completion) -> TokenIds:
    assert completion.prompt_ids is not None
    assert completion.response_ids is not None
    return np.concatenate([completion.prompt_ids, completion.response_ids])


USER: Message = {"role": "user", "content": "Look around and tell me what you see."}


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
def test_a_prompt_is_the_ids_before_and_what_is_new(wire: Any, scale_out: bool) -> None:
    async def play(bench: _Bench) -> None:
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
            held = whole(completion)
            again = encoder.encode(encoder.decode(held))
            retokenised += len(again) == len(held) and bool(np.array_equal(again, held))
            messages = [*messages, *answered(completion, turn)]
        [row] = segments(bench.calls)
        assert held is not None
        assert np.array_equal(np.concatenate([row.prompt_ids, row.response_ids]), held)
        assert row.response_mask.sum() == sum(call.n_response_tokens for call in bench.calls)
        # text sampled by random weights does not encode to the same ids: else this test proves nothing
        assert retokenised < 20

    run(play, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=20))


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
def test_an_answer_is_held_to_its_form_where_the_engine_can(wire: Any, scale_out: bool) -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        free = await bench.ask(policy, [USER])
        assert free.labels == {}
        held = FormedSampling(answer_schema={"type": "object"}, required=True)
        assert (await bench.ask(policy, [USER], sampling=held)).labels == {"guided": "yes"}
        must_call = FormedSampling(tool_choice="required", required=True)
        assert (await bench.ask(policy, [USER], sampling=must_call)).labels == {"guided": "yes"}

    run(play, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=10))


def test_a_form_that_no_engine_can_be_held_to_is_refused_only_if_it_is_required() -> None:
    async def play(bench: _Bench) -> None:
        # the engine's wire is vLLM's, and no other is known
        address, info = bench.listed[0].address, bench.listed[0].info
        assert info is not None
        bench.listed[0] = EngineRecord(address, info.model_copy(update={"kind": "openai"}))
        bench.pool.changed()
        policy, form = bench.policy(), {"answer_schema": {"type": "object"}}
        assert (await bench.ask(policy, [USER], sampling=FormedSampling.model_validate(form))).labels == {}
        with pytest.raises(FormUnsupported, match=r"^r1: "):
            await bench.ask(policy, [USER], sampling=FormedSampling.model_validate({**form, "required": True}))

    run(play, EngineDouble(scale_out=False, mean_tokens=10))


class _NoForms:
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


class _Formless(EngineDouble):
    refused_by = 400

    def app(self) -> Starlette:
        app = super().app()
        app.add_middleware(_NoForms, status=self.refused_by)
        return app


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", False)])
@pytest.mark.parametrize("status", [400, 500])
def test_a_form_that_the_engine_refuses_is_sampled_freely_unless_it_is_required(
    wire: Any, scale_out: bool, status: int
) -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        for form in ({"answer_schema": {"type": "bogus"}}, {"tool_choice": "required"}):
            free = await bench.ask(policy, [USER], sampling=FormedSampling.model_validate(form))
            assert free.labels == {}
            assert free.n_response_tokens
            with pytest.raises(FormUnsupported, match=r"^r1: .*Grammar error: Invalid type: bogus"):
                await bench.ask(policy, [USER], sampling=FormedSampling.model_validate({**form, "required": True}))

    double = _Formless(wire=wire, scale_out=scale_out, mean_tokens=10)
    double.refused_by = status
    run(play, double)


def test_without_tools_to_call_no_text_is_read_as_a_call() -> None:
    async def play(bench: _Bench) -> None:
        called = 0
        for sampling in (SAMPLING, FormedSampling(tool_choice="none", seed=3)):
            policy, messages = bench.policy(), [USER]
            for turn in range(20):
                completion = await bench.ask(policy, messages, sampling=sampling)
                messages = [*messages, *answered(completion, turn)]
                called += len(completion.response.get("tool_calls") or [])
                if sampling is not SAMPLING:
                    assert "tool_calls" not in completion.response
                    assert completion.begins == ("" if turn else "first")
        assert called, "else this test proves nothing"

    run(play, EngineDouble(mean_tokens=20))


def test_conversations_that_branch_share_what_they_have_in_common() -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        first = await bench.ask(policy, [USER])
        one, other = answered(first, 1), answered(first, 2)
        left = await bench.ask(policy, [USER, *one])
        right = await bench.ask(policy, [USER, *other])
        compacted = await bench.ask(policy, [{"role": "user", "content": "In short: all is well. Go on."}])
        assert left.prompt_ids is not None
        assert right.prompt_ids is not None
        for branch in (left.prompt_ids, right.prompt_ids):
            assert np.array_equal(branch[: len(whole(first))], whole(first))
        assert compacted.begins.startswith("branch")
        rows = segments(bench.calls)
        assert len(rows) == 3
        assert sum(int(row.response_mask.sum()) for row in rows) == sum(c.n_response_tokens for c in bench.calls)

    run(play, EngineDouble(mean_tokens=20))


def test_a_turn_that_was_cut_gets_its_end_as_a_token_nobody_sampled() -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        cut = await bench.ask(policy, [USER], max_tokens=4)
        assert cut.finish_reason == "length"
        await bench.ask(policy, [USER, *answered(cut, 0)])
        [row] = segments(bench.calls)
        end = tokenizer.load(str(bench.doubles[0].root)).tokenizer.end_ids
        assert list(row.response_mask[:5]) == [1, 1, 1, 1, 0]
        assert int(row.response_ids[4]) in end

    run(play, EngineDouble(mean_tokens=500))


def test_an_aborted_answer_goes_on_under_the_new_weights() -> None:
    async def play(bench: _Bench) -> None:
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

    run(play, EngineDouble(mean_tokens=5_000, tokens_per_s=40, weight_version="7"))


async def give_new_weights(bench: _Bench) -> None:
    """Abort the running samples of the only engine, and let it continue with weights `8`."""
    [double] = bench.doubles
    await when(lambda: double.n_tokens >= 5)
    await pause(bench, "abort")
    bench.order(paused="abort", n_orders=1, n_done=1, engine_paused="abort", version="7", engine_version="7")
    await when(lambda: double.n_running == 0)
    await post(bench, "/update_weight_version", {"new_version": "8"})
    await post(bench, "/resume")
    bench.order(n_orders=2, n_done=2, version="8", engine_version="8")


async def pause(bench: _Bench, mode: str) -> None:
    await post(bench, f"/pause?mode={mode}")


async def post(bench: _Bench, path: str, body: Any = None) -> None:
    async with httpx2.AsyncClient() as client:
        (await client.post(bench.urls[0] + path, json=body)).raise_for_status()


def test_a_stream_is_the_answer_in_pieces() -> None:
    async def play(bench: _Bench) -> None:
        policy, messages, n_pieces = bench.policy(), [USER], 0
        for turn in range(8):
            pieces: list[Delta] = []
            completion = await bench.ask(policy, messages, on_delta=pieces.append)
            text = "".join(piece.text for piece in pieces if not piece.reasoning)
            thought = "".join(piece.text for piece in pieces if piece.reasoning)
            assert text == completion.response["content"]
            assert thought == completion.response.get("reasoning_content", "")
            n_pieces += len(pieces)
            messages = [*messages, *answered(completion, turn)]
        assert n_pieces > 8

    run(play, EngineDouble(mean_tokens=20))


def test_a_stream_on_an_engine_that_goes_out_is_told_to_be_broken() -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        pieces: list[Delta] = []
        result = asyncio.ensure_future(bench.ask(policy, [USER], max_tokens=5_000, on_delta=pieces.append))
        await when(lambda: pieces)
        [playing] = [place for place in bench.pool.backends if place.in_flight]
        playing.abort_calls("is out: it died", died=True)
        with pytest.raises(EngineError, match=r"r1: .* broke off .* ask again") as caught:
            await result
        assert caught.value.retryable
        # nothing of it is kept: a retry is a new call
        again = await bench.ask(policy, [USER], max_tokens=8, on_delta=pieces.append)
        assert again.begins == "first"

    run(play, *(EngineDouble(mean_tokens=5_000, tokens_per_s=200) for _ in range(2)))


def test_a_stream_does_not_go_on_in_the_ids_of_another_tokenizer(tmp_path: Path) -> None:
    async def play(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy()
        pieces: list[Delta] = []
        result = asyncio.ensure_future(bench.ask(policy, [USER], max_tokens=400, on_delta=pieces.append))
        await when(lambda: pieces)
        of_another_tokenizer(bench, tmp_path)
        await pause(bench, "abort")
        await when(lambda: double.n_running == 0)
        await post(bench, "/resume")
        with pytest.raises(EngineError, match=r"r1: .* other token ids; ask again"):
            await result

    run(play, EngineDouble(mean_tokens=5_000, tokens_per_s=200))


def test_calls_on_engines_of_another_tokenizer_begin_anew_and_say_so(tmp_path: Path) -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        first = await bench.ask(policy, [USER])
        messages = [USER, *answered(first, 0)]
        of_another_tokenizer(bench, tmp_path)
        second = await bench.ask(policy, messages)
        third = await bench.ask(policy, [*messages, *answered(second, 1)])
        assert [first.begins, second.begins[:7], third.begins] == ["first", "branch:", ""]
        assert "other token ids" in second.begins

    run(play, EngineDouble(mean_tokens=20))


def of_another_tokenizer(bench: _Bench, folder: Path) -> None:
    """Change the engine's record to the tokenizer files in `folder`, which differ."""
    shutil.copytree(bench.doubles[0].root, folder, dirs_exist_ok=True)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    [known] = bench.listed
    bench.listed[0] = EngineRecord(replace(known.address, tokenizer=str(folder)), known.info)
    bench.pool.changed()


def test_an_engine_that_saw_another_prompt_makes_its_row_untrainable() -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        bench.doubles[0].fail_next("echo")
        completion = await bench.ask(policy, [USER])
        assert completion.mismatch is not None
        [row] = segments(bench.calls)
        assert not row.trainable
        assert row.mismatch == completion.mismatch

    run(play, EngineDouble())


@pytest.mark.parametrize("kind", ["500", "502", "429", "503", "close", "reset", "lengths", "garbage"])
def test_a_fault_of_an_engine_is_not_seen_by_the_rollout(kind: str) -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        before = await bench.ask(policy, [USER])
        messages = [USER, *answered(before, 0)]
        for double in bench.doubles:
            double.fail_next(kind)
        completion = await bench.ask(policy, messages)
        assert completion.prompt_ids is not None
        assert np.array_equal(completion.prompt_ids[: len(whole(before))], whole(before))
        assert completion.mismatch is None

    run(play, EngineDouble(retry_after_s=0.2), EngineDouble(retry_after_s=0.2))


def test_a_request_that_every_engine_refuses_is_told_with_the_rollouts_id() -> None:
    async def play(bench: _Bench) -> None:
        bench.doubles[0].faults.set_rates({"garbage": 1.0})
        with pytest.raises(EngineError, match="r1: ") as caught:
            await bench.ask(bench.policy(), [USER])
        assert bench.urls[0] in str(caught.value)

    run(play, EngineDouble())


def test_an_engine_with_a_tool_format_that_nobody_knows_is_passed_over() -> None:
    async def play(bench: _Bench) -> None:
        good, wrong = bench.listed
        bench.listed[1] = EngineRecord(replace(wrong.address, tool_format="nonsense"), wrong.info)
        for number in range(8):
            router = StickyRouter(bench.pool, RoutingKey(f"r{number}", f"g{number}"))
            completion = await bench.ask(RolloutPolicy(router, f"r{number}"), [USER])
            assert completion.engine == good.address.url
        bench.listed.pop(0)
        with pytest.raises(EngineError, match="unknown tool format 'nonsense': use one of hermes"):
            await bench.ask(bench.policy(), [USER])

    run(play, EngineDouble(), EngineDouble())


def test_tools_are_refused_where_the_models_format_of_calls_is_unknown(tmp_path: Path) -> None:
    """Its calls would be taken for the answer; a configured tool format tells them apart."""
    write_model_text(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<tool_call>", "<call>"))

    async def play(bench: _Bench) -> None:
        [engine] = bench.listed
        assert engine.info is not None
        address = replace(engine.address, tokenizer=str(tmp_path))
        assert await tool_format_of(address, engine.info) == "none"
        bench.listed[0] = EngineRecord(address, engine.info)
        with pytest.raises(EngineError, match=r"r1: .*no supported format of calls"):
            await bench.ask(bench.policy(), [USER])
        await bench.ask(bench.policy(), [USER], sampling=FormedSampling(tool_choice="none"))
        for tool_format in ("none", "hermes"):
            bench.listed[0] = EngineRecord(replace(address, tool_format=tool_format), engine.info)
            await bench.ask(bench.policy(), [USER])

    run(play, EngineDouble())


def test_busy_engines_are_waited_for_and_named() -> None:
    async def play(bench: _Bench) -> None:
        bench.doubles[0].faults.set_rates({"429": 1.0})
        policy = bench.policy()
        result = asyncio.ensure_future(bench.ask(policy, [USER]))
        await when(lambda: "busy" in policy.blocked)
        assert bench.urls[0] in policy.blocked
        bench.doubles[0].faults.clear()
        await result
        assert policy.blocked == ""

    run(play, EngineDouble(retry_after_s=0.3))


def test_a_full_context_is_a_limit() -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy()
        with pytest.raises(LimitReached) as caught:
            await bench.ask(policy, [{"role": "user", "content": "word " * 2000}])
        assert caught.value.outcome is Outcome.CONTEXT_FULL

    run(play, EngineDouble(context_tokens=900))


def bound(name: str, most: int) -> PromptRules:
    values: dict[str, Any] = {name: most}
    return PromptRules(**values)


@pytest.mark.parametrize("name", ["max_row_tokens", "max_response_tokens"])
def test_a_row_that_is_full_is_a_limit(name: str) -> None:
    async def play(bench: _Bench) -> None:
        first = await bench.ask(bench.policy(), [USER])
        n_prompt, n_sampled = first.n_prompt_tokens, first.n_response_tokens
        most = n_sampled + (n_prompt if name == "max_row_tokens" else 0)
        # one token less, and the answer is cut there
        policy = bench.policy(bound(name, most - 1))
        cut = await bench.ask(policy, [USER])
        assert (cut.finish_reason, cut.n_response_tokens) == ("length", n_sampled - 1)
        # with the tools' results, the row exceeds its limit
        policy = bench.policy(bound(name, most + 5))
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

    run(play, EngineDouble(context_tokens=8192))


def test_prompt_that_cannot_fit_is_a_limit_before_it_is_encoded() -> None:
    async def play(bench: _Bench) -> None:
        with pytest.raises(LimitReached, match=r"a prompt of 15000\d{3} characters in a context of 100000") as limit:
            await bench.ask(bench.policy(), [{"role": "user", "content": "word " * 3_000_000}])
        assert limit.value.outcome is Outcome.CONTEXT_FULL

    run(play, EngineDouble(context_tokens=100_000))


@pytest.mark.parametrize("restart", [True, False])
def test_newer_weights_overtake_a_rollout(restart: bool) -> None:
    async def play(bench: _Bench) -> None:
        policy = bench.policy(PromptRules(max_staleness=1, restart_stale=restart))
        first = await bench.ask(policy, [USER])
        assert first.versions == (VersionSpan("3", 0, first.n_response_tokens),)
        bench.order(version="4", engine_version="4")
        second = await bench.ask(policy, [USER, *answered(first, 0)])
        bench.order(version="5", engine_version="5")
        with pytest.raises(StaleRollout, match="max_staleness 1") as caught:
            await bench.ask(policy, [USER, *answered(first, 0), *answered(second, 1)])
        assert caught.value.restart is restart

    run(play, EngineDouble(weight_version="3"))


def test_weights_that_overtake_a_rollout_during_its_last_call_are_found_too() -> None:
    async def play(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy(PromptRules(max_staleness=0))
        result = asyncio.ensure_future(bench.ask(policy, [USER]))
        await when(lambda: double.n_running)
        bench.order(version="4", engine_version="4")
        with pytest.raises(StaleRollout, match="weights 4"):
            await result

    run(play, EngineDouble(weight_version="3", mean_tokens=40, tokens_per_s=100))


def test_weights_that_overtake_a_rollout_while_it_waits_are_found_before_it_samples() -> None:
    async def play(bench: _Bench) -> None:
        [double] = bench.doubles
        policy = bench.policy(PromptRules(max_staleness=0))
        first = await bench.ask(policy, [USER])
        n_tokens = double.n_tokens
        bench.order(paused="drain", version="3", engine_version="3")
        result = asyncio.ensure_future(bench.ask(policy, [USER, *answered(first, 0)]))
        await when(lambda: policy.paused_s > 0)
        bench.order(version="4", engine_version="4")
        with pytest.raises(StaleRollout, match="weights 4"):
            await result
        assert double.n_tokens == n_tokens

    run(play, EngineDouble(weight_version="3"))


@pytest.mark.parametrize("wire", ["vllm", "openai"])
def test_a_chat_engine_that_names_no_weights_is_taken_at_the_farms_word(wire: Any) -> None:
    async def play(bench: _Bench) -> None:
        [known] = bench.listed
        assert known.info is not None
        bench.listed[0] = EngineRecord(known.address, known.info.model_copy(update={"token_in": ""}))
        bench.order(version="4", engine_version="4")
        policy = bench.policy(PromptRules(max_staleness=1))
        completion = await bench.ask(policy, [USER])
        assert completion.policy_version == "4"
        exact = completion.response_ids is not None
        assert exact is (wire == "vllm")
        assert completion.versions == ((VersionSpan("4", 0, completion.n_response_tokens),) if exact else ())
        bench.order(version="6", engine_version="6")
        with pytest.raises(StaleRollout, match="max_staleness 1"):
            await bench.ask(policy, [USER, *answered(completion, 0)])

    run(play, EngineDouble(wire=wire, version="0.32.0"))


def test_an_engine_that_names_no_weights_is_taken_at_the_farms_word() -> None:
    async def play(bench: _Bench) -> None:
        bench.order(version="4", engine_version="4")
        completion = await bench.ask(bench.policy(), [USER])
        assert completion.versions == (VersionSpan("4", 0, completion.n_response_tokens),)

    run(play, EngineDouble(version="0.32.0", scale_out=False))


def test_the_loop_goes_on_while_a_long_text_is_encoded() -> None:
    """Another text of the same rollout waits for its turn."""

    async def play(bench: _Bench) -> None:
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
        both = await asyncio.gather(*[bench.ask(policy, [long, *answered(completion, turn)]) for turn in range(4)])
        for each in both:
            assert each.prompt_ids is not None
            assert np.array_equal(each.prompt_ids[: len(whole(completion))], whole(completion))

    run(play, EngineDouble(mean_tokens=20))


def test_text_alone_is_played_and_never_called_exact() -> None:
    async def play(bench: _Bench) -> None:
        policy, messages = bench.policy(), [USER]
        for turn in range(3):
            completion = await bench.ask(policy, messages)
            assert completion.response_ids is None
            messages = [*messages, *answered(completion, turn)]
        assert segments(bench.calls) == ()

    run(play, EngineDouble(wire="openai"))
