"""Routed experts as written by vLLM's and SGLang's own functions, and malformed ones."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from farm.records.request import SamplingParams
from workers.policy.engines.chat_only import ChatOnlyKind
from workers.policy.engines.generation_builder import MAX_LAYERS, expert_rows, from_int32, from_npy, most_expert_bytes
from workers.policy.engines.kind import kind
from workers.policy.engines.prorl import PromptIdsWire
from workers.policy.engines.sglang import SglangWire
from workers.policy.engines.vllm import CompletionsWire, GenerateWire
from workers.policy.engines.wire import GenerationRequest
from workers.policy.generation import ExpertRange

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[4] / "data" / "routed_experts.json").read_text())[
    "cases"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case["shape"])))
def test_output_of_the_engines_own_functions_is_read(case: dict[str, Any]) -> None:
    n_rows, _, top_k = case["shape"]
    for found in (from_npy(case["vllm"]), from_int32(case["sglang"]), from_npy(case["prime_rl"])):
        experts = expert_rows(found, ExpertRange(top_k, 5), 5 + n_rows + 1)
        assert experts.ids is not None
        assert experts.ids.tolist() == case["experts"]
        assert experts.ids.dtype == (np.uint8 if case["n_experts"] <= 256 else np.uint16)
        assert (experts.start, experts.end) == (5, 5 + n_rows)


def npy(array: Any, **more: Any) -> str:
    with io.BytesIO() as file:
        np.save(file, np.asarray(array), **more)
        return base64.b64encode(file.getvalue()).decode()


GOOD = np.arange(24).reshape(4, 3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an array"),
        ("not base64!", "not base64"),
        (npy(GOOD)[:-8], "not an array"),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "not an array"),
        (npy(np.array([{}]), allow_pickle=True), "not an array"),
        (7, "not a text"),
        ({}, "not an array: 'dtype'"),
        ({"data": "Bw==", "shape": [1, 2, 1], "dtype": "uint8"}, "cannot reshape"),
        ({"data": "Bw==", "shape": [1, 1, 1], "dtype": "object"}, "not an array: 'object'"),
        ({"data": "Bw==", "shape": "x", "dtype": "uint8"}, "not an array"),
        ({"data": None, "shape": [1, 1, 1], "dtype": "uint8"}, "not a text"),
        ([1], "not a text"),
    ],
)
def test_malformed_array_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_npy(text)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (GOOD.astype(float), "of float64"),
        (GOOD.astype(bool), "of bool"),
        (GOOD[0], "in 2 dimensions"),
        (GOOD[:3], "has 3 rows, but 4 tokens from position 1 on"),
        (GOOD[:0], "has 0 rows"),
        (np.repeat(GOOD, 2, axis=0), "has 8 rows"),
        (GOOD[:, :, :1], "has 1 experts per token, but sampling.routed_experts is 2"),
        (np.repeat(GOOD, 2, axis=1), "6 layers, but earlier calls had 3"),
        (GOOD - 1, "from -1 to 22"),
        (GOOD + 65_530, "to 65553"),
        (GOOD.reshape(-1)[:-1], "23 numbers"),
        (GOOD.reshape(-1)[:0], "0 numbers"),
        (np.zeros(4 * 2 * 5, int), "5 layers, but"),
    ],
)
def test_rows_of_other_tokens_layers_or_numbers_are_refused(found: Any, message: str) -> None:
    wanted = ExpertRange(2, 1, 3)
    assert expert_rows(GOOD, wanted, 6).end == 5
    with pytest.raises(ValueError, match=re.escape(message)):
        expert_rows(found, wanted, 6)


def test_model_with_too_many_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers"):
        expert_rows(np.zeros((2, MAX_LAYERS + 1, 1), int), ExpertRange(1), 3)


def test_largest_answer_fits_the_limit() -> None:
    most = most_expert_bytes(len(b"[1,2,3]"), 10, ExpertRange(8))
    largest = base64.b64encode(np.zeros((3 + 10 - 1, MAX_LAYERS, 8), "<i4").tobytes())
    assert most >= len(largest)


def body(wire: Any, experts: ExpertRange | None) -> dict[str, Any]:
    ask = GenerationRequest(b"[1,2,3]", SamplingParams(routed_experts=8), 5, "m", False, experts)
    result: dict[str, Any] = orjson.loads(orjson.dumps(wire.body(ask)))
    return result


def test_each_wire_requests_only_the_new_part() -> None:
    wanted = ExpertRange(8, 2)
    assert body(GenerateWire(), wanted)["sampling_params"]["routed_experts_prompt_start"] == 2
    assert body(CompletionsWire(), wanted)["routed_experts_prompt_start"] == 2
    of_sglang = body(SglangWire(), wanted)
    assert (of_sglang["return_routed_experts"], of_sglang["routed_experts_start_len"]) == (True, 2)
    for wire in (GenerateWire(), CompletionsWire(), SglangWire(), PromptIdsWire()):
        assert "routed_experts" not in json.dumps(body(wire, None)), "the number is the farm's own"


def test_wires_without_experts_declare_it() -> None:
    lacking = [PromptIdsWire(), *ChatOnlyKind().wires(None)]  # type: ignore[arg-type]
    assert all("routed_experts" in wire.lacks for wire in lacking)
    having = [*kind("vllm").wires(None), *kind("sglang").wires(_Info())]  # type: ignore[arg-type]
    assert not any("routed_experts" in wire.lacks for wire in having)


class _Info:
    model = ""
