from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from farm.records.atif_export import AtifTrajectory, atif_trajectory
from farm.records.rollout import Outcome, Reward, Rollout, Stage, State
from farm.records.trajectory import ModelCall, VersionSpan, token_ids


def _rollout() -> Rollout:
    return Rollout(
        rollout_id="b.0.0",
        batch_id="b",
        group_index=0,
        sample_index=0,
        data_source="harbor",
        instance_id="i",
        stage=Stage.EVAL,
        state=State.COMPLETED,
        attempt=1,
        node="n",
        outcome=Outcome.SUBMITTED,
        reward=1.0,
        failure=None,
        n_turns=2,
        n_response_tokens=5,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=1,
    )


def _call(index: int, messages: list[dict[str, Any]], response: dict[str, Any], **more: Any) -> ModelCall:
    return ModelCall(
        index=index,
        messages=messages,
        started_at=1000.0 + index,
        latency_s=0.5,
        finish_reason="stop",
        response={"role": "assistant", **response},
        engine="http://e/v1",
        n_prompt_tokens=3,
        n_response_tokens=2,
        policy_version="7",
        prompt_ids=token_ids([1, 2, 3]),
        response_ids=token_ids([4, 5]),
        response_logprobs=np.asarray([-0.5, -np.inf], np.float32),
        versions=(VersionSpan("7", 0, 1), VersionSpan("8", 1, 2)),
        **more,
    )


def _tool_call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def _two_turns() -> list[ModelCall]:
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": "do it"}]
    first = _call(
        0,
        prompt,
        {"content": None, "reasoning_content": "hm", "tool_calls": [_tool_call("c1", '{"command": "ls"}')]},
        observations=[{"role": "tool", "tool_call_id": "c1", "content": "a.txt"}],
    )
    return [first, _call(1, [{"role": "user", "content": "and then"}], {"content": "done"})]


def test_rollout_is_a_valid_atif_document() -> None:
    text = atif_trajectory(_rollout(), _two_turns(), [Reward(1.0, {"why": "ok"}, "harbor", 2.0)]).to_json()
    document = AtifTrajectory.model_validate(json.loads(text))
    assert document.schema_version == "ATIF-v1.8"
    assert [(step.step_id, step.source) for step in document.steps] == [
        (1, "system"),
        (2, "user"),
        (3, "agent"),
        (4, "user"),
        (5, "agent"),
    ]
    step = document.steps[2]
    assert step.metrics is not None
    assert step.metrics.prompt_token_ids == [1, 2, 3]
    assert step.metrics.completion_token_ids == [4, 5]
    assert step.metrics.logprobs == [-0.5, pytest.approx(-3.4028235e38)]
    assert step.reasoning_content == "hm"
    assert step.tool_calls is not None
    assert step.tool_calls[0].arguments == {"command": "ls"}
    assert step.observation is not None
    assert (step.observation.results[0].source_call_id, step.observation.results[0].content) == ("c1", "a.txt")
    assert step.extra is not None
    assert [span["version"] for span in step.extra["versions"]] == ["7", "8"]
    assert document.final_metrics is not None
    assert (document.final_metrics.total_prompt_tokens, document.final_metrics.total_steps) == (6, 5)
    assert document.extra is not None
    assert (document.extra["reward"], document.extra["reward_details"]) == (1.0, {"why": "ok"})


def test_agent_lists_all_tools_of_its_calls() -> None:
    look_tool, put_tool = (
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "put")
    )
    calls = _two_turns()
    assert "tool_definitions" not in json.loads(atif_trajectory(_rollout(), calls).to_json())["agent"]
    calls[0].tools, calls[1].tools = [look_tool], [look_tool, put_tool]
    assert json.loads(atif_trajectory(_rollout(), calls).to_json())["agent"]["tool_definitions"] == [
        look_tool,
        put_tool,
    ]


def test_arguments_that_are_not_an_object_are_kept_as_text() -> None:
    call = _call(0, [{"role": "user", "content": "x"}], {"content": "", "tool_calls": [_tool_call("c", "[1")]})
    made = atif_trajectory(_rollout(), [call]).steps[-1].tool_calls
    assert made is not None
    assert (made[0].arguments, made[0].extra) == ({}, {"text": "[1"})


def test_results_without_a_call_and_rewritten_answers_are_kept() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "old", "content": "early"},
        {"role": "assistant", "content": "summary"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
    ]
    steps = atif_trajectory(_rollout(), [_call(0, messages, {"content": "ok"})]).steps
    assert [(step.source, step.is_copied_context) for step in steps] == [
        ("user", None),
        ("agent", True),
        ("user", None),
        ("agent", None),
    ]


def test_image_of_a_call_is_a_reference_to_its_artefact() -> None:
    image = {"type": "image", "sha256": "ab" * 32, "media_type": "image/png", "n_bytes": 3}
    (step, _) = atif_trajectory(_rollout(), [_call(0, [{"role": "user", "content": [image]}], {"content": "ok"})]).steps
    assert isinstance(step.message, list)
    (part,) = step.message
    assert part.source is not None
    assert (part.type, part.source.media_type, part.source.path) == ("image", "image/png", f"{'ab' * 32}.png")


def test_rollout_without_calls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b\.0\.0 has no model calls"):
        atif_trajectory(_rollout(), [])


_STEP = {"step_id": 1, "source": "user", "message": "x"}


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{**_STEP, "step_id": 2}],
        [{**_STEP, "metrics": {}}],
        [{**_STEP, "surprise": 1}],
        [{**_STEP, "timestamp": "yesterday"}],
        [{**_STEP, "observation": {"results": [{"source_call_id": "c"}]}}],
        [{**_STEP, "source": "agent", "llm_call_count": 0, "metrics": {}}],
        [{**_STEP, "message": [{"type": "image", "text": "x"}]}],
    ],
)
def test_documents_that_harbor_refuses_are_refused(steps: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError):
        AtifTrajectory.model_validate({"agent": {"name": "a", "version": "1"}, "steps": steps})
