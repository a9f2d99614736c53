"""Routed experts over real HTTP, as from vLLM and SGLang: each token of each row has those of its own history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from farm.errors import EngineError
from farm.records.experts.expert_stretches import assembled, stretches_of
from farm.records.experts.routed_experts import RowExperts
from farm.records.request import SamplingParams
from farm.records.trajectory import ModelCall, Segment, segments, segments_per_call
from tests.doubles import EngineDouble
from tests.integration.engines.test_rollout_policy import USER, _Bench, give_new_weights, next_messages, run, wait_until
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.simulated_values import ExpertRouting

CHECK_S = 0.2
"""The interval at which a bench checks its engines."""
ROUTING = ExpertRouting()
SAMPLING = SamplingParams(temperature=1.0, seed=3, routed_experts=ROUTING.top_k)
WIRES = [("vllm", True), ("vllm", False), ("sglang", False)]


def experts_of(row: Segment, calls: Sequence[ModelCall]) -> RowExperts:
    found = {call.index: call.routed_experts for call in calls if call.routed_experts is not None}
    of_calls = {index: each.ids for index, each in found.items() if each.ids is not None}
    experts = assembled(len(row.prompt_ids) + len(row.response_ids), stretches_of(row, calls), of_calls)
    assert experts is not None
    return experts


def check(
    row: Segment,
    calls: Sequence[ModelCall],
    routing: ExpertRouting,
    versions: Sequence[str] = ("default",),
    n_unknown: int = 1,
) -> NDArray[np.bool_]:
    """Compare the experts of a row with those of its ids, under one of these weights; return which are of which."""
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    experts = experts_of(row, calls)
    assert experts.first_unknown == len(ids) - n_unknown
    assert not experts.ids[experts.first_unknown :].any()
    expected = [routing.of(ids, version) for version in versions]
    fits = np.array([(experts.ids == each).all(axis=(1, 2)) for each in expected])
    assert fits[:, : experts.first_unknown].any(axis=0).all()
    return fits


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
@pytest.mark.parametrize("streamed", [False, True])
def test_each_token_of_a_conversation_has_its_own_experts(wire: Any, scale_out: bool, streamed: bool) -> None:
    async def main(bench: _Bench) -> None:
        policy, messages = bench.policy(), [USER]
        pieces: list[Any] = []
        for turn in range(8):
            more: dict[str, Any] = {"on_delta": pieces.append} if streamed else {}
            completion = await bench.ask(policy, messages, sampling=SAMPLING, **more)
            messages = [*messages, *next_messages(completion, turn)]
        [row] = segments(bench.calls)
        check(row, bench.calls, ROUTING)
        ends = [(call.routed_experts.start, call.routed_experts.end) for call in bench.calls if call.routed_experts]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])], "nothing is sent twice"
        assert bool(pieces) is streamed
        *earlier, last = segments_per_call(bench.calls)
        check(last, bench.calls, ROUTING)
        for each in earlier:
            # the last token was an input of the next call
            check(each, bench.calls, ROUTING, n_unknown=0)

    run(main, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=20, experts=ROUTING))


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
@pytest.mark.parametrize("n_experts", [8, 255, 256, 257, 512, 65_536])
def test_any_number_of_experts_is_stored(wire: Any, scale_out: bool, n_experts: int) -> None:
    routing = ExpertRouting(n_layers=5, top_k=8, n_experts=n_experts)
    sampling = SAMPLING.model_copy(update={"routed_experts": 8})

    async def main(bench: _Bench) -> None:
        await bench.ask(bench.policy(), [USER], sampling=sampling)
        [row] = segments(bench.calls)
        check(row, bench.calls, routing)
        experts = experts_of(row, bench.calls)
        assert experts.ids.dtype == (np.uint8 if n_experts <= 256 else np.uint16)
        assert int(experts.ids.max()) > n_experts * 0.7

    run(main, EngineDouble(wire=wire, scale_out=scale_out, experts=routing, mean_tokens=60))


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
def test_truncated_turn_and_branch_have_their_own_experts(wire: Any, scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        policy = bench.policy()
        first = await bench.ask(policy, [USER], max_tokens=4, sampling=SAMPLING)
        await bench.ask(policy, [USER, *next_messages(first, 0)], sampling=SAMPLING)
        await bench.ask(policy, [USER, *next_messages(first, 1)], sampling=SAMPLING)
        await bench.ask(policy, [USER], max_tokens=1, sampling=SAMPLING)
        rows = segments(bench.calls)
        assert len(rows) == 3
        for row in rows:
            check(row, bench.calls, ROUTING)

    run(main, EngineDouble(wire=wire, scale_out=scale_out, mean_tokens=500, experts=ROUTING))


@pytest.mark.parametrize("scale_out", [True, False])
def test_aborted_answer_has_the_experts_of_the_weights_that_sampled_it(scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        result = asyncio.ensure_future(bench.ask(bench.policy(), [USER], max_tokens=120, sampling=SAMPLING))
        await give_new_weights(bench)
        completion = await result
        [row] = segments(bench.calls)
        of_seven, of_eight = check(row, bench.calls, ROUTING, ("7", "8"))
        n_first = int((row.policy_versions == 7).sum()) if scale_out else len(row.response_ids) - _n_new(of_eight)
        # the last token of the first part was an input only of the second
        n_of_seven = len(row.prompt_ids) + n_first - 1
        assert of_seven[:n_of_seven].all()
        assert of_eight[n_of_seven:-1].all()
        assert completion.routed_experts is not None
        assert completion.routed_experts.end == len(of_seven) - 1

    run(
        main, EngineDouble(mean_tokens=5_000, tokens_per_s=40, weight_version="7", experts=ROUTING, scale_out=scale_out)
    )


@pytest.mark.parametrize(("wire", "scale_out"), [("vllm", True), ("sglang", False)])
def test_answer_continued_under_new_weights_has_the_experts_of_both(wire: Any, scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        [double] = bench.doubles
        result = asyncio.ensure_future(bench.ask(bench.policy(), [USER], max_tokens=60, sampling=SAMPLING))
        await wait_until(lambda: double.n_tokens >= 5)
        await double.scheduler.pause("keep")
        double.scheduler.version = "8"
        double.scheduler.resume()
        completion = await result
        assert [span.version for span in completion.versions] == ["7", "8"]
        [row] = segments(bench.calls)
        of_seven, of_eight = check(row, bench.calls, ROUTING, ("7", "8"))
        # an input has the experts of the weights that sampled the token after it
        n_of_seven = len(row.prompt_ids) + completion.versions[0].end - 1
        assert of_seven[:n_of_seven].all()
        assert of_eight[n_of_seven:-1].all()

    options: dict[str, Any] = {"mean_tokens": 5_000, "tokens_per_s": 40, "weight_version": "7"}
    run(main, EngineDouble(wire=wire, experts=ROUTING, scale_out=scale_out, **options))


def _n_new(of_eight: NDArray[np.bool_]) -> int:
    """Return the number of tokens at the end with the newer weights, without the last one before them."""
    return len(of_eight) - int(np.flatnonzero(of_eight[:-1])[0]) - 1


@dataclass(frozen=True, slots=True)
class Faulty(ExpertRouting):
    """An engine whose rows do not belong to its tokens."""

    fault: Literal["short", "long", "whole", "negative", "huge", "layers"] = "short"

    def rows(self, run: EngineRun, start: int) -> NDArray[np.int32]:
        good = super(Faulty, self).rows(run, start)
        if self.fault == "whole":
            return super(Faulty, self).rows(run, 0)
        if self.fault == "layers":
            return np.concatenate([good, good], axis=1) if start else good
        if self.fault in ("negative", "huge"):
            good[len(good) // 2, 0, 0] = -1 if self.fault == "negative" else 70_000
            return good
        return good[:-1] if self.fault == "short" else np.concatenate([good, good[-1:]])


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
@pytest.mark.parametrize("fault", ["short", "long", "whole", "layers"])
def test_wrong_number_of_expert_rows_is_an_error_naming_the_engine(wire: Any, scale_out: bool, fault: Any) -> None:
    async def main(bench: _Bench) -> None:
        policy, messages = bench.policy(), [USER]
        if fault in ("whole", "layers"):
            messages += next_messages(await bench.ask(policy, messages, sampling=SAMPLING), 0)
        with pytest.raises(EngineError, match=r"engine http://.*routed_experts"):
            await bench.ask(policy, messages, sampling=SAMPLING)

    run(main, EngineDouble(wire=wire, scale_out=scale_out, experts=Faulty(fault=fault)))


@pytest.mark.parametrize("fault", ["negative", "huge"])
def test_invalid_expert_numbers_are_refused(fault: Any) -> None:
    async def main(bench: _Bench) -> None:
        with pytest.raises(EngineError, match="are not expert numbers"):
            await bench.ask(bench.policy(), [USER], sampling=SAMPLING)

    run(main, EngineDouble(wire="sglang", experts=Faulty(fault=fault)))


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
def test_other_number_of_experts_than_requested_is_refused(wire: Any, scale_out: bool) -> None:
    sampling = SAMPLING.model_copy(update={"routed_experts": 4})

    async def main(bench: _Bench) -> None:
        with pytest.raises(EngineError, match=r"engine http://.*sampling\.routed_experts (is )?4"):
            await bench.ask(bench.policy(), [USER], sampling=sampling)
        if wire == "vllm":
            # the number is wrong, not the engine: it is neither probed again nor taken out
            assert bench.doubles[0].n_started == 3
            await bench.ask(bench.policy(), [USER])

    run(main, EngineDouble(wire=wire, scale_out=scale_out, experts=ExpertRouting(n_layers=3, top_k=2)))


@pytest.mark.parametrize(("wire", "scale_out"), WIRES)
def test_engine_without_routed_experts_is_refused_at_its_first_answer(wire: Any, scale_out: bool) -> None:
    async def main(bench: _Bench) -> None:
        with pytest.raises(EngineError, match=r"gives no routed_experts: start it with --enable-return-routed-experts"):
            await bench.ask(bench.policy(), [USER], sampling=SAMPLING)
        assert bench.doubles[0].n_started == 3, "two of the detection, and one"
        # for all others it is as usable as before: it is not probed again, which would sample
        await asyncio.sleep(5 * CHECK_S)
        await bench.ask(bench.policy(), [USER])
        assert bench.doubles[0].n_started == 4

    run(main, EngineDouble(wire=wire, scale_out=scale_out))


def test_text_only_engine_is_refused() -> None:
    async def main(bench: _Bench) -> None:
        with pytest.raises(EngineError, match="routed_experts"):
            await bench.ask(bench.policy(), [USER], sampling=SAMPLING)

    run(main, EngineDouble(wire="openai", experts=ROUTING))


def test_call_goes_to_an_engine_with_routed_experts() -> None:
    async def main(bench: _Bench) -> None:
        for _ in range(3):
            await bench.ask(bench.policy(), [USER], sampling=SAMPLING)
        assert all(call.routed_experts is not None for call in bench.calls)

    run(main, EngineDouble(seed=1), EngineDouble(seed=1, experts=ROUTING))


def test_unrequested_experts_are_not_stored() -> None:
    async def main(bench: _Bench) -> None:
        completion = await bench.ask(bench.policy(), [USER])
        assert completion.routed_experts is None
        [row] = segments(bench.calls)
        assert stretches_of(row, bench.calls) == ()

    run(main, EngineDouble(experts=ROUTING))
