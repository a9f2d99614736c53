"""The token-in wires compared with recorded responses of vLLM 0.32.0, and its own schemas of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from farm.records.request import SamplingParams
from farm.records.trajectory import VersionSpan, token_ids
from workers.policy.answer_form import FormedSampling
from workers.policy.engines.generation_builder import GenerationBuilder
from workers.policy.engines.prorl import PromptIdsWire
from workers.policy.engines.sglang import SglangWire
from workers.policy.engines.vllm import CompletionsWire, GenerateWire
from workers.policy.engines.wire import GenerationRequest, Wire, prompt_json
from workers.policy.generation import ExpertRange, Generation

DATA = Path(__file__).parents[4] / "data"
RECORDED: dict[str, Any] = orjson.loads((DATA / "vllm_wire" / "requests.json").read_bytes())
SCHEMAS: dict[str, Any] = orjson.loads((DATA / "vllm_schemas.json").read_bytes())["classes"]
PROMPT = token_ids([258, 84, 82])
HELD = FormedSampling(guide={"json_schema": {"type": "object"}})
HELD_CALLS = FormedSampling(guide={"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}})
ALL = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=0,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    min_tokens=200,
    stop=("END",),
    stop_token_ids=(3, 4),
    seed=11,
    cache_salt="weights-7",
)


def read(wire: Wire, *events: dict[str, Any]) -> tuple[Generation, list[list[int]]]:
    intake = GenerationBuilder(PROMPT)
    new = [wire.take(event, intake) for event in events]
    return intake.generation(), new


def recorded_events(name: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in RECORDED[name]["lines"]]
    return [orjson.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("wire", "name"), [(GenerateWire(), "generate_tokens"), (CompletionsWire(), "completions_tokin")]
)
def test_recorded_answer_is_read(wire: Wire, name: str) -> None:
    generation, _ = read(wire, RECORDED[name]["resp"])
    assert generation.response_ids.tolist() == [207, 129, 160, 187, 84]
    assert generation.response_logprobs is not None
    assert generation.response_logprobs.tolist()[:2] == pytest.approx([-5.40386962890625, -5.897067070007324])
    assert generation.finish_reason == "length"
    assert generation.prompt_ids is not None
    assert len(generation.prompt_ids) == 24
    assert generation.n_cached_tokens == 0
    assert generation.versions == ((VersionSpan("42", 0, 5),) if name.startswith("generate") else ())


@pytest.mark.parametrize(("name", "reason"), [("stop_token", 28), ("stop_str", "i")])
def test_stop_reason_is_returned_and_its_tokens_are_kept(name: str, reason: Any) -> None:
    generation, _ = read(CompletionsWire(), RECORDED[name]["resp"])
    assert (generation.finish_reason, generation.stop_reason) == ("stop", reason)
    assert len(generation.response_ids) == RECORDED[name]["resp"]["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("wire", "name", "n"), [(GenerateWire(), "abort_generate", 0), (CompletionsWire(), "abort_completions", 1)]
)
def test_aborted_answer_keeps_its_tokens(wire: Wire, name: str, n: int) -> None:
    generation, _ = read(wire, RECORDED[name]["resp"])
    assert generation.finish_reason == "abort"
    assert len(generation.response_ids) == n


@pytest.mark.parametrize(
    ("wire", "name"), [(GenerateWire(), "stream_generate"), (CompletionsWire(), "stream_completions")]
)
def test_recorded_stream_is_read(wire: Wire, name: str) -> None:
    generation, new = read(wire, *recorded_events(name))
    assert new == [[207], [129], [160], []]
    assert generation.response_ids.tolist() == [207, 129, 160]
    assert generation.prompt_ids is not None
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("name", ["stream_generate", "stream_completions"])
def test_stream_that_lost_an_event_is_refused(name: str) -> None:
    wire = GenerateWire() if name == "stream_generate" else CompletionsWire()
    events = recorded_events(name)
    for lost in range(1, len(events)):
        with pytest.raises(ValueError, match=r"token|finish reason"):
            read(wire, *events[:lost], *events[lost + 1 :])


@pytest.mark.parametrize(
    ("wire", "schema"), [(GenerateWire(), "GenerateRequest"), (CompletionsWire(), "CompletionRequest")]
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sampling", [ALL, SamplingParams(temperature=None), HELD, HELD_CALLS])
def test_fields_sent_to_vllm_are_in_its_schema(wire: Wire, schema: str, stream: bool, sampling: SamplingParams) -> None:
    ask = GenerationRequest(prompt_json(PROMPT), sampling, 100, "m", stream, ExpertRange(8, 2))
    body = orjson.loads(orjson.dumps(wire.body(ask)))
    Draft202012Validator(SCHEMAS[schema]).validate(body)
    # A field of vLLM 0.33, ignored by 0.32.
    assert body.keys() - SCHEMAS[schema]["properties"].keys() <= {"return_weight_versions"}
    inner = body.get("sampling_params", {})
    assert inner.keys() <= SCHEMAS["GenerateRequest"]["properties"]["sampling_params"]["properties"].keys()


def test_sampling_parameters_are_passed_unchanged() -> None:
    ask = GenerationRequest(prompt_json(PROMPT), ALL, 100, "m", False)
    same = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["END"],
        "stop_token_ids": [3, 4],
    }
    # no engine accepts min_tokens above max_tokens
    sent = same | {"top_k": 0, "seed": 11, "min_tokens": 100, "max_tokens": 100}
    body = GenerateWire().body(ask)
    assert sent.items() <= body["sampling_params"].items()
    assert body["cache_salt"] == "weights-7"
    assert (sent | {"cache_salt": "weights-7"}).items() <= CompletionsWire().body(ask).items()
    assert sent.items() <= PromptIdsWire().body(ask).items()
    body = SglangWire("m").body(ask)
    assert body["sampling_params"] == same | {
        "top_k": -1,
        "sampling_seed": 11,
        "min_new_tokens": 100,
        "max_new_tokens": 100,
    }
    assert body["extra_key"] == "weights-7"
    assert orjson.loads(orjson.dumps(body))["input_ids"] == [258, 84, 82]


def test_output_formats_are_sent_in_the_form_of_each_server() -> None:
    for sampling, name, vllm in ((HELD, "json_schema", "json"), (HELD_CALLS, "structural_tag", "structural_tag")):
        ask = GenerationRequest(prompt_json(PROMPT), sampling, 100, "m", False)
        form = (sampling.guide or {})[name]
        sent = GenerateWire().body(ask)["sampling_params"]["structured_outputs"]
        assert sent == CompletionsWire().body(ask)["structured_outputs"]
        assert sent.keys() == {vllm}
        assert form == (sent["json"] if vllm == "json" else orjson.loads(sent["structural_tag"]))
        assert orjson.loads(SglangWire("m").body(ask)["sampling_params"][name]) == form


def test_unset_parameters_are_left_to_the_engine() -> None:
    ask = GenerationRequest(prompt_json(PROMPT), SamplingParams(temperature=None), 5, "m", False)
    assert GenerateWire().body(ask)["sampling_params"] == {"max_tokens": 5, "logprobs": 0, "detokenize": False}
    assert SglangWire("m").body(ask)["sampling_params"] == {"max_new_tokens": 5}


def test_another_model_than_sglangs_own_is_an_adapter() -> None:
    result = [GenerationRequest(prompt_json(PROMPT), ALL, 5, model, False) for model in ("m", "", "adapter")]
    assert [SglangWire("m").body(ask).get("lora_path") for ask in result] == [None, None, "adapter"]


def sglang_event(ids: list[int], n: int, end: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": end,
            "prompt_tokens": 3,
            "completion_tokens": n,
            "cached_tokens": 2,
            "weight_version": "7",
            "output_token_logprobs": [[-id_ / 10, id_, None] for id_ in ids],
            **meta,
        },
    }


STOP = {"type": "stop", "matched": 2}


def test_answer_of_sglang_is_read() -> None:
    generation, _ = read(SglangWire(), sglang_event([4, 5, 2], 3, STOP) | {"prompt_token_ids": [258, 84, 82]})
    assert generation.response_ids.tolist() == [4, 5, 2]
    assert generation.response_logprobs is not None
    assert generation.response_logprobs.tolist() == pytest.approx([-0.4, -0.5, -0.2])
    assert (generation.finish_reason, generation.stop_reason, generation.n_cached_tokens) == ("stop", 2, 2)
    assert generation.versions == (VersionSpan("7", 0, 3),)


def test_version_spans_of_sglang_are_read() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    generation, _ = read(SglangWire(), sglang_event([4, 5], 2, {"type": "length", "length": 2}, weight_versions=spans))
    assert generation.versions == (VersionSpan("6", 0, 1), VersionSpan("7", 1, 2))
    assert (generation.finish_reason, generation.stop_reason) == ("length", None)


@pytest.mark.parametrize("incremental", [False, True])
def test_stream_of_sglang_may_be_cumulative_or_incremental(incremental: bool) -> None:
    pieces = [[4], [5, 6], [2]] if incremental else [[4], [4, 5, 6], [4, 5, 6, 2]]
    counts = [1, 3, 4]
    events = [sglang_event(ids, n, STOP if n == 4 else None) for ids, n in zip(pieces, counts, strict=True)]
    generation, new = read(SglangWire(), *events)
    assert new == [[4], [5, 6], [2]]
    assert generation.response_ids.tolist() == [4, 5, 6, 2]
    assert generation.response_logprobs is not None
    assert len(generation.response_logprobs) == 4


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    answer = orjson.loads(orjson.dumps(RECORDED["generate_tokens"]["resp"]))
    entries = answer["choices"][0]["logprobs"]["content"]
    entries[0], entries[1] = entries[1], entries[0]
    with pytest.raises(ValueError, match="other tokens"):
        read(GenerateWire(), answer)
